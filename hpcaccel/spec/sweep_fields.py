"""A sweep: a job spec, and what is searched around it. The field descriptions are the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from hpcaccel.spec.entrypoint import argument_value
from hpcaccel.spec.fields import Conflict, Count, Natural, Positive, Section, Seed, Word, checked_text
from hpcaccel.spec.job import JobSpec
from hpcaccel.spec.parameters import Parameter
from hpcaccel.spec.problems import did_you_mean
from hpcaccel.spec.pruners import Pruner, PrunerChoice

__all__ = ["METHODS", "Method", "Sweep", "SweepFile", "SweepSpec"]

Method = Literal["grid", "random", "tpe", "gp", "cmaes", "qmc"]
METHODS: tuple[Method, ...] = ("grid", "random", "tpe", "gp", "cmaes", "qmc")
ALONE: tuple[Method, ...] = ("cmaes",)
"""Methods that know one metric only."""
UNCONDITIONAL: tuple[Method, ...] = ("gp", "cmaes")
"""Methods whose model needs every parameter in every trial."""


def _metric(value: Any) -> Any:
    names = value if isinstance(value, list | tuple) else [value]
    if not names:
        raise ValueError("must name a metric, as the program logs it: loss")
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise ValueError("must be a metric's name, as the program logs it, or a list of names")
        if name in names[:index]:
            raise ValueError(f"names {name!r} twice")
        checked_text(name)
    return names[0] if len(names) == 1 else list(names)


def _mode(value: Any) -> Any:
    modes = value if isinstance(value, list | tuple) else [value]
    for mode in modes:
        if mode not in ("min", "max"):
            shown = repr(mode) if isinstance(mode, str) else mode
            inside = f"holds {shown}, which " if isinstance(value, list | tuple) else ""
            raise ValueError(f"{inside}is not allowed (has: min, max){did_you_mean(str(mode), ['min', 'max'])}")
    return modes[0] if len(modes) == 1 else list(modes)


def _points(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list of points: [{args.lr: 1.0e-3}]")
    for index, point in enumerate(value):
        if not isinstance(point, dict) or not point:
            raise ValueError(f"item {index + 1} must be a mapping of parameters to values: {{args.lr: 1.0e-3}}")
    return [{str(name): argument_value(item, str(name)) for name, item in point.items()} for point in value]


def _parameters(value: Any) -> Any:
    if not value:
        raise ValueError(
            "must name what is searched, such as args.lr: {float: [1.0e-4, 1.0e-1], log: true}: the space is empty"
        )
    return value


_TEXTS = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
_MODE = {"enum": ["min", "max"]}
Metric = Annotated[str | list[str], BeforeValidator(_metric), WithJsonSchema(_TEXTS)]
Mode = Annotated[
    str | list[str],
    BeforeValidator(_mode),
    WithJsonSchema({"anyOf": [_MODE, {"type": "array", "items": _MODE, "minItems": 1}]}),
]
Points = Annotated[
    list[dict[str, Any]],
    BeforeValidator(_points),
    WithJsonSchema({"type": "array", "items": {"type": "object", "minProperties": 1}}),
]


class Sweep(Section):
    """What is searched, how, and how long."""

    moved: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("trials", "n_trials", "num_samples", "budget"), "is called max_trials here"),
        **dict.fromkeys(("sampler", "search_alg", "algorithm", "searcher"), "is called method here"),
        **dict.fromkeys(("scheduler", "early_terminate", "early_stopping"), "is called pruner here"),
        **dict.fromkeys(("direction", "directions", "goal"), "is called mode here: min or max"),
        **dict.fromkeys(("objective", "metrics"), "is called metric here"),
        **dict.fromkeys(("space", "search_space", "params", "param_space"), "is called parameters here"),
        **dict.fromkeys(("n_jobs", "concurrency", "max_concurrent", "max_concurrent_trials"), "is called workers here"),
        **dict.fromkeys(
            ("timeout", "time", "time_budget_s"), "is not known: slurm.time limits a worker, max_gpu_hours the sweep"
        ),
        **dict.fromkeys(("num_seeds", "seeds", "repeats"), "is called repeat here"),
    }

    method: Method = Field(
        default="tpe",
        description="grid: every point in turn. random. tpe: the tree of Parzen estimators, for most spaces. gp: a "
        "Gaussian process, for few and long trials. cmaes: for many trials over numbers. qmc: evenly spread (Sobol).",
    )
    pruner: PrunerChoice = Field(
        default_factory=Pruner,
        description="Ends bad trials early: asha, hyperband, median or none; with settings {asha: {min_steps: 100}}.",
    )
    metric: Metric = Field(
        description="What decides, by the name that the program logs it with; the last logged value counts. A list: "
        "the best trials are those of the Pareto front.",
        examples=["loss", ["loss", "seconds"]],
    )
    mode: Mode = Field(
        default="min",
        description="min or max: a small or a large value is better; for several metrics a list in their order.",
    )
    parameters: Annotated[dict[Word, Parameter], BeforeValidator(_parameters)] = Field(
        description="What is searched: paths of this file to their values. Any path may stand here that is no matter "
        "of the allocation; `args.name` is an argument of the program, set in the file or not.",
        examples=[{"args.lr": {"float": [1.0e-4, 1.0e-1], "log": True}, "args.depth": {"choice": [2, 4, 8]}}],
    )
    max_trials: Count | None = Field(
        default=None, description="Trials at most, repeats counted; null: until the space or max_gpu_hours is used up."
    )
    workers: Count = Field(
        default=1, description="Tasks of the array; each has an allocation of its own and runs trial after trial."
    )
    max_gpu_hours: Positive | None = Field(
        default=None, description="GPU-hours of all workers together, after which no trial starts; null: no limit."
    )
    repeat: Count = Field(
        default=1,
        description="Trials of every point, which differ in runtime.seed only; the point is ranked by their mean.",
    )
    pack: Count = Field(default=1, description="Trials side by side in one worker, which divide its GPUs.")
    enqueue: Points = Field(
        default_factory=list,
        description="Points to try first, after the spec's own values. What a point leaves out is chosen for it.",
        examples=[[{"args.lr": 3.0e-3, "args.depth": 4}]],
    )
    retries: Natural = Field(default=1, description="How often a trial that failed is tried again.")
    keep_checkpoints: Natural | None = Field(
        default=5, description="Of how many of the best finished trials checkpoints are kept; null: of all."
    )
    seed: Seed = Field(
        default=0, description="Of what is chosen at random. With repeat, also the first seed of a point's trials."
    )

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        metric, mode = values.get("metric"), values.get("mode") or "min"
        metrics, modes = _listed(metric), _listed(mode)
        if len(metrics) != len(modes):
            wanted = f"must be a list of {len(metrics)}" if len(metrics) > 1 else "must be one of min and max"
            found.append(Conflict("mode", f"{wanted}, one for each metric ({', '.join(map(str, metrics))})"))
        if len(metrics) > 1:
            found += _several(values)
        return found

    @property
    def metrics(self) -> list[str]:
        """All metrics, one or several."""
        return _listed(self.metric)

    @property
    def modes(self) -> list[str]:
        """min or max for each of the metrics."""
        return _listed(self.mode)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _several(values: dict[str, Any]) -> list[Conflict]:
    found = []
    pruner = values.get("pruner")
    if pruner is not None and pruner != "none" and pruner != Pruner() and pruner != {}:
        found.append(
            Conflict("pruner", "cannot stand beside several metrics: no one of them says which trial is worse")
        )
    if values.get("method") in ALONE:
        found.append(Conflict("method", f"{values['method']} knows one metric only: use tpe, gp, qmc, random or grid"))
    return found


class SweepFile(JobSpec):
    """A file of a sweep: a job spec with one more section."""

    moved: ClassVar[dict[str, str]] = {key: value for key, value in JobSpec.moved.items() if key != "sweep"}

    sweep: Sweep = Field(description="What is searched: metric, parameters, and for how long.")

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        if values.get("components"):
            advice = "cannot stand beside sweep: its workers are an array, and Slurm has none of heterogeneous jobs"
            found.append(Conflict("components", advice))
        return found


class SweepSpec(Section):
    """A job and the sweep around it. ``load_sweep`` has checked that they fit."""

    job: JobSpec = Field(description="The spec of every trial, but for the parameters.")
    sweep: Sweep = Field(description="What is searched.")

    @property
    def source(self) -> Path | None:
        """The file that this was loaded from."""
        return self.job.source
