"""The models of a sweep: the section ``sweep``, and the job around it. The field descriptions are the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from hpcaccel.core.formatting import did_you_mean
from hpcaccel.spec.job.entrypoint import argument_value
from hpcaccel.spec.job.fields import Conflict, Count, Natural, Positive, Section, Seed, Word, checked_text
from hpcaccel.spec.job.job_spec import JobSpec
from hpcaccel.spec.sweep.parameters import Parameter
from hpcaccel.spec.sweep.pruners import Pruner, PrunerChoice

__all__ = ["METHODS", "Method", "SweepFile", "SweepSection", "SweepSpec"]

Method = Literal["grid", "random", "tpe", "gp", "cmaes", "qmc"]
METHODS: tuple[Method, ...] = ("grid", "random", "tpe", "gp", "cmaes", "qmc")
ALONE: tuple[Method, ...] = ("cmaes",)
"""Methods that support only a single metric."""
UNCONDITIONAL: tuple[Method, ...] = ("gp", "cmaes")
"""Methods whose model needs every parameter in every trial."""


def _metric(value: Any) -> Any:
    names = value if isinstance(value, list | tuple) else [value]
    if not names:
        raise ValueError("must be the name of a metric that the program logs, such as loss")
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise ValueError("must be the name of a metric that the program logs, or a list of such names")
        if name in names[:index]:
            raise ValueError(f"contains {name!r} twice")
        checked_text(name)
    return names[0] if len(names) == 1 else list(names)


def _mode(value: Any) -> Any:
    modes = value if isinstance(value, list | tuple) else [value]
    for mode in modes:
        if mode not in ("min", "max"):
            shown = repr(mode) if isinstance(mode, str) else mode
            inside = f"contains {shown}, which " if isinstance(value, list | tuple) else ""
            raise ValueError(f"{inside}is not valid (allowed: min, max){did_you_mean(str(mode), ['min', 'max'])}")
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
        raise ValueError("is empty: add at least one parameter, such as args.lr: {float: [1.0e-4, 1.0e-1], log: true}")
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


class SweepSection(Section):
    """What to search, how, and for how long."""

    moved: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("trials", "n_trials", "num_samples", "budget"), "is called max_trials here"),
        **dict.fromkeys(("sampler", "search_alg", "algorithm", "searcher"), "is called method here"),
        **dict.fromkeys(("scheduler", "early_terminate", "early_stopping"), "is called pruner here"),
        **dict.fromkeys(("direction", "directions", "goal"), "is called mode here: min or max"),
        **dict.fromkeys(("objective", "metrics"), "is called metric here"),
        **dict.fromkeys(("space", "search_space", "params", "param_space"), "is called parameters here"),
        **dict.fromkeys(("n_jobs", "concurrency", "max_concurrent", "max_concurrent_trials"), "is called workers here"),
        **dict.fromkeys(
            ("timeout", "time", "time_budget_s"),
            "is not a key of sweep: slurm.time limits each worker, max_gpu_hours the whole sweep",
        ),
        **dict.fromkeys(("num_seeds", "seeds", "repeats"), "is called repeat here"),
    }

    method: Method = Field(
        default="tpe",
        description="grid: all points in order. random: random points. tpe: tree-structured Parzen estimator, for most "
        "search spaces. gp: Gaussian process, for few and long trials. cmaes: CMA-ES, for many trials with numeric "
        "parameters. qmc: evenly spread points (Sobol).",
    )
    pruner: PrunerChoice = Field(
        default_factory=Pruner,
        description="Ends bad trials early: asha, hyperband, median or none; with settings: {asha: {min_steps: 100}}.",
    )
    metric: Metric = Field(
        description="The metric to optimize, by the name under which the program logs it; the last logged value "
        "counts. With a list of metrics, the best trials are those on the Pareto front.",
        examples=["loss", ["loss", "seconds"]],
    )
    mode: Mode = Field(
        default="min",
        description="min: smaller is better; max: larger is better. For several metrics, a list in the same order.",
    )
    parameters: Annotated[dict[Word, Parameter], BeforeValidator(_parameters)] = Field(
        description="The search space: settings of this file, by path, with their values. Settings that are fixed for "
        "a sweep, such as those of the allocation, are rejected. `args.name` is an argument of the program, whether or "
        "not the file sets it.",
        examples=[{"args.lr": {"float": [1.0e-4, 1.0e-1], "log": True}, "args.depth": {"choice": [2, 4, 8]}}],
    )
    max_trials: Count | None = Field(
        default=None,
        description="Maximum number of trials, including repeats; null: until the space or max_gpu_hours is used up.",
    )
    workers: Count = Field(
        default=1, description="Number of array tasks; each has its own allocation and runs trial after trial."
    )
    max_gpu_hours: Positive | None = Field(
        default=None,
        description="GPU-hours of all workers together; at the limit, running trials save and stop. null: no limit.",
    )
    repeat: Count = Field(
        default=1,
        description="Trials per point, which differ only in runtime.seed; the point is ranked by their mean.",
    )
    pack: Count = Field(default=1, description="Trials that run side by side in one worker and divide its GPUs.")
    enqueue: Points = Field(
        default_factory=list,
        description="Points to try first, after the spec's own values. The sampler chooses values that a point omits.",
        examples=[[{"args.lr": 3.0e-3, "args.depth": 4}]],
    )
    retries: Natural = Field(default=1, description="How often a failed trial is retried.")
    keep_checkpoints: Natural | None = Field(
        default=5, description="Number of best finished trials whose checkpoints are kept; null: all."
    )
    seed: Seed = Field(
        default=0,
        description="Seed of the sampler. With repeat and without runtime.seed, also the first seed of a point's "
        "trials.",
    )

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        metric, mode = values.get("metric"), values.get("mode") or "min"
        metrics, modes = _listed(metric), _listed(mode)
        if len(metrics) != len(modes):
            names = ", ".join(map(str, metrics))
            several = f"must be a list of {len(metrics)} values, one for each metric ({names})"
            message = several if len(metrics) > 1 else f"must be one value, min or max, for the single metric {names}"
            found.append(Conflict("mode", message))
        if len(metrics) > 1:
            found += _several(values)
        return found

    @property
    def metrics(self) -> list[str]:
        """The metrics, as a list even if there is only one metric."""
        return _listed(self.metric)

    @property
    def modes(self) -> list[str]:
        """``min`` or ``max`` for each metric."""
        return _listed(self.mode)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _several(values: dict[str, Any]) -> list[Conflict]:
    found = []
    pruner = values.get("pruner")
    if pruner is not None and pruner != "none" and pruner != Pruner() and pruner != {}:
        found.append(
            Conflict("pruner", "cannot be combined with several metrics: a pruner compares trials by a single metric")
        )
    if values.get("method") in ALONE:
        found.append(
            Conflict("method", f"{values['method']} supports only one metric: use tpe, gp, qmc, random or grid")
        )
    return found


class SweepFile(JobSpec):
    """A sweep file: a job spec with a section ``sweep``."""

    moved: ClassVar[dict[str, str]] = {key: value for key, value in JobSpec.moved.items() if key != "sweep"}

    sweep: SweepSection = Field(description="The sweep: metric, parameters and limits.")

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        if values.get("components"):
            advice = (
                "cannot be combined with sweep: its workers are a job array, and Slurm has no arrays of "
                "heterogeneous jobs"
            )
            found.append(Conflict("components", advice))
        return found


class SweepSpec(Section):
    """A job and its sweep. ``load_sweep`` and ``sweep_from_values`` check that they fit together."""

    job: JobSpec = Field(description="The spec of every trial, except for the parameters.")
    sweep: SweepSection = Field(description="The sweep.")

    @property
    def source(self) -> Path | None:
        """The file that this sweep was loaded from; None for one built from Python values."""
        return self.job.source
