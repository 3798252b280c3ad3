# ruff: noqa: E501  (error messages are not wrapped)
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hpcaccel.errors import SpecError
from hpcaccel.spec import JobSpec, SweepSpec, load_spec, load_sweep, resolve, sweep_from_values, sweep_schema
from hpcaccel.spec.loading.canonical import sweep_to_yaml
from hpcaccel.spec.loading.overrides import grid
from hpcaccel.spec.sweep.points import count, notes, own_point, points, seed_of

HEAD = "name: gpt\nentrypoint: {script: train.py, args: {lr: 3.0e-3, depth: 4}}\n"
LR = "parameters: {args.lr: {float: [1.0e-4, 1.0e-1], log: true}}"


def load(sweep: str, *overrides: str, head: str = HEAD) -> SweepSpec:
    """Load a sweep from the text of its section; ``metric`` and a limit are added if missing."""
    lines = [
        *([] if "metric:" in sweep else ["metric: loss"]),
        *([] if "max_trials" in sweep or "max_gpu" in sweep else ["max_trials: 10"]),
    ]
    body = "\n".join(f"  {line}" for line in [*sweep.splitlines(), *lines])
    Path("sweep.yaml").write_text(f"{head}sweep:\n{body}\n", encoding="utf-8")
    return load_sweep("sweep.yaml", overrides=overrides)


@pytest.fixture
def problems() -> Callable[..., Sequence[str]]:
    def of(sweep: str, *overrides: str, head: str = HEAD) -> Sequence[str]:
        with pytest.raises(SpecError) as caught:
            load(sweep, *overrides, head=head)
        return caught.value.problems

    return of


def parameter(text: str) -> str:
    return f"parameters: {{args.lr: {text}}}"


# -- loading --------------------------------------------------------------------------------------------------------


def test_sweep_with_every_key_loads() -> None:
    spec = load(
        """\
method: tpe
pruner: asha
metric: loss
mode: min
parameters:
  args.lr: {float: [1.0e-4, 1.0e-1], log: true}
  args.depth: {choice: [2, 4, 8]}
  runtime.mixed_precision: {choice: [no, bf16]}
max_trials: 100
workers: 8
max_gpu_hours: 200
repeat: 1
pack: 1
enqueue: []
retries: 1
keep_checkpoints: 5
seed: 0"""
    )
    sweep = spec.sweep
    assert (sweep.metrics, sweep.modes, sweep.pruner.name) == (["loss"], ["min"], "asha")
    assert sweep.parameters["args.lr"].range() == (1e-4, 1e-1)
    assert sweep.parameters["runtime.mixed_precision"].choice == ["no", "bf16"]
    assert spec.job.arguments() == ["--lr", "3e-3", "--depth", "4"]
    assert spec.source == Path("sweep.yaml").absolute()
    assert SweepSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_sweep_file_may_extend_a_job_file(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(HEAD)
    spec = load(f"{LR}\npruner: {{asha: {{}}}}", head="extends: job.yaml\n")
    assert (spec.job.name, spec.sweep.pruner.name) == ("gpt", "asha")


def test_sweep_loads_from_python_values() -> None:
    values = {
        "name": "a",
        "entrypoint": {"script": "train.py"},
        "sweep": {"metric": "acc", "mode": "max", "max_trials": 3},
    }
    spec = sweep_from_values(values, overrides=["sweep.parameters.args.lr={choice: [1, 2]}", "workers=2"])
    assert (spec.sweep.modes, spec.sweep.workers, spec.sweep.parameters["args.lr"].choice) == (["max"], 2, [1, 2])


def test_overrides_apply_to_the_sweep_and_to_the_job() -> None:
    spec = load(LR, "max_trials=3", "sweep.pruner={median: {startup_trials: 2}}", "nodes=2", "args.lr=1")
    args: Any = spec.job.entrypoint.args
    assert (spec.sweep.max_trials, spec.job.slurm.nodes, args["lr"]) == (3, "2", 1)
    assert spec.sweep.pruner.median is not None
    assert spec.sweep.pruner.median.startup_trials == 2


@pytest.mark.parametrize(("text", "name"), [("none", "none"), ("", "none"), ("{asha: }", "asha"), ("{hyperband: {max_steps: 81}}", "hyperband")])  # fmt: skip
def test_pruner_may_be_a_name_a_mapping_or_empty(text: str, name: str) -> None:
    assert load(f"{LR}\npruner: {text}").sweep.pruner.name == name


@pytest.mark.parametrize(
    "sweep",
    [
        "parameters: {args.a: {choice: [null, true, 1, '1', 007, [1, 2], ~/x]}, args.b: {float: [0, 1], step: 0.1, when: {args.a: [1, null]}}}",
        f"{LR}\nenqueue: [{{args.lr: 0.01}}]\nmetric: [a, b]\nmode: [min, max]",
        f"{LR}\npruner: {{hyperband: {{max_steps: 64}}}}\nmax_trials: null\nmax_gpu_hours: 3\nkeep_checkpoints: null",
    ],
)
def test_sweep_survives_yaml_round_trip(sweep: str) -> None:
    spec = load(sweep)
    Path("again.yaml").write_text(sweep_to_yaml(spec))
    again = load_sweep("again.yaml")
    assert (again.job, again.sweep) == (spec.job, spec.sweep)


def test_importing_spec_does_not_import_the_sweep_models() -> None:
    code = "import sys, hpcaccel.spec; print('hpcaccel.spec.sweep.sweep_fields' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# -- trials and parameters ------------------------------------------------------------------------------------------


def test_trial_spec_is_the_job_with_the_point_applied() -> None:
    spec = load("parameters: {args.lr: {choice: [1, 2]}, args.new: {choice: [a, null]}, keep: {int: [1, 4]}}")
    job = resolve(spec, {"args.lr": 2, "args.new": "a", "keep": 3}, seed=7)
    assert isinstance(job, JobSpec)
    assert job.arguments() == ["--lr", "2", "--depth", "4", "--new", "a"]
    assert (job.checkpoint.keep, job.runtime.seed) == (3, 7)
    assert resolve(spec, {}) == spec.job


def test_parameters_may_be_nested_arguments_and_lists() -> None:
    head = "name: g\nentrypoint: {script: train.py, args_style: key=value, args: {model: {depth: 4}}}\n"
    spec = load(
        "parameters: {args.model.depth: {int: [2, 8]}, args.betas: {choice: [[0.9, 0.95], [0.9, 0.99]]}}", head=head
    )
    assert resolve(spec, {"args.model.depth": 6, "args.betas": [0.9, 0.99]}).arguments() == [
        "model.depth=6",
        "betas=[0.9,0.99]",
    ]


def test_trials_and_grid_tasks_use_the_args_style_of_the_spec() -> None:
    head = "name: g\nentrypoint: {script: train.py, args_style: equals, args: {compile: true, model: {depth: 4}}}\n"
    spec = load(
        "parameters: {args.compile: {choice: [true, false]}, args.lr: {float: [1.0e-4, 1.0]}, args.model.depth: {int: [2, 8]}}",
        head=head,
    )
    assert resolve(spec, {"args.compile": False, "args.lr": 3e-4, "args.model.depth": 8}).arguments() == [
        "--compile=False", "--model.depth=8", "--lr=3e-4",
    ]  # fmt: skip
    Path("grid.yaml").write_text(head)
    tasks = [
        load_spec("grid.yaml", overrides=task).arguments() for task in grid(["args.compile=true,false", "args.x=a"])
    ]
    assert tasks == [["--compile=True", "--model.depth=4", "--x=a"], ["--compile=False", "--model.depth=4", "--x=a"]]


def test_choices_are_stored_as_the_job_spec_parses_them(tmp_path: Path) -> None:
    spec = load("parameters: {checkpoint.resume: {choice: [never, ckpt/a]}, args.id: {choice: [007, 8]}}")
    assert spec.sweep.parameters["checkpoint.resume"].choice == ["never", str(tmp_path / "ckpt/a")]
    assert spec.sweep.parameters["args.id"].choice == ["007", 8]


def test_own_point_has_the_values_of_the_spec_that_are_in_the_space() -> None:
    spec = load(
        "parameters: {args.lr: {float: [1.0e-4, 1.0]}, args.depth: {choice: [2, 8]}, mixed_precision: {choice: [bf16, no]}}"
    )
    assert own_point(spec) == {"args.lr": 3e-3, "mixed_precision": "no"}


def test_parameters_come_after_those_they_depend_on() -> None:
    spec = load(
        "parameters:\n  args.m: {float: [0, 1], step: 0.5, when: {entrypoint.args.opt: sgd}}\n  args.opt: {choice: [adam, sgd]}\n"
        "  args.n: {choice: [true, false], when: {args.m: [0.5, 1]}}"
    )
    parameters = spec.sweep.parameters
    assert list(parameters) == ["args.opt", "args.m", "args.n"]
    every = list(points(parameters))
    assert every[0] == {"args.opt": "adam"}
    assert every[1:3] == [{"args.opt": "sgd", "args.m": 0.0}, {"args.opt": "sgd", "args.m": 0.5, "args.n": True}]
    assert len(every) == count(parameters) == 6


def test_points_of_a_finite_space_are_counted() -> None:
    spec = load(
        "parameters: {args.a: {int: [1, 9], step: 2}, args.b: {float: [0, 1], step: 0.1}, args.c: {choice: [x, y]}}"
    )
    assert count(spec.sweep.parameters) == 5 * 11 * 2
    assert [point["args.b"] for point in points(spec.sweep.parameters)][6] == 0.3
    assert count(load(LR).sweep.parameters) is None


@pytest.mark.parametrize(("head", "seeds"), [(HEAD, [5, 6]), (HEAD + "runtime: {seed: 40}\n", [40, 41])])
def test_repeats_have_consecutive_seeds(head: str, seeds: list[int]) -> None:
    spec = load(f"{LR}\nrepeat: 2\nseed: 5", head=head)
    assert [seed_of(spec, 0), seed_of(spec, 1)] == seeds
    assert seed_of(load(LR), 0) is None


# -- errors and notes -----------------------------------------------------------------------------------------------


def test_loading_a_sweep_file_as_a_job_points_to_sweep_start() -> None:
    load(LR)
    with pytest.raises(SpecError, match=r"sweep.yaml:3: sweep is for `hpcaccel sweep start`"):
        load_spec("sweep.yaml")


def test_file_without_a_sweep_section_is_refused() -> None:
    Path("job.yaml").write_text(HEAD)
    with pytest.raises(SpecError) as caught:
        load_sweep("job.yaml")
    assert caught.value.problems == ["job.yaml:1: sweep is missing. The sweep: metric, parameters and limits."]


GRID = "use `hpcaccel submit --grid`, which submits one job for each value"


@pytest.mark.parametrize(
    ("sweep", "problem"),
    [
        ("parameters: {args.lr: {float: [1, 2]}, ags.depth: {choice: [1, 2]}}", "4: sweep.parameters.ags.depth is not a known key. Did you mean 'args.depth'?"),
        ("parameters: {checkpoint.kepe: {int: [1, 2]}}", "4: sweep.parameters.checkpoint.kepe is not a known key (allowed: every_steps, every_minutes, background, when_busy, snapshot_every_steps, snapshot_replicas, keep, keep_every_steps, resume, watch). Did you mean 'keep'?"),
        ("parameters: {runtime.fsdp.warp: {choice: [a, b]}}", None),
        ("parameters: {slurm.nodes: {choice: [1, 2]}}", f"4: sweep.parameters.slurm.nodes cannot be searched, because a worker keeps its allocation from trial to trial: {GRID}"),
        ("parameters: {nodes: {choice: [1, 2]}}", f"4: sweep.parameters.nodes cannot be searched, because a worker keeps its allocation from trial to trial: {GRID}"),
        ("parameters: {environment.env.X: {choice: [1, 2]}}", f"4: sweep.parameters.environment.env.X cannot be searched, because a worker sets it up once, before its trials: search an argument of the program (args.…), or {GRID}"),
        ("parameters: {script: {choice: [a.py, b.py]}}", f"4: sweep.parameters.script cannot be searched, because all trials run the same program: search its arguments (args.…), or {GRID}"),
        ("parameters: {name: {choice: [a, b]}}", "4: sweep.parameters.name cannot be searched, because it is the directory name of the whole sweep"),
        ("parameters: {requeue: {choice: [true, false]}}", "4: sweep.parameters.requeue cannot be searched, because it controls how a worker is requeued, which is the same for all its trials"),
        ("parameters: {args.lr: {choice: [1, 2]}, entrypoint.args.lr: {choice: [1, 2]}}", "4: sweep.parameters.entrypoint.args.lr overlaps with args.lr: remove one of them"),
        ("parameters: {}", "4: sweep.parameters is empty: add at least one parameter, such as args.lr: {float: [1.0e-4, 1.0e-1], log: true}"),
        (parameter("{float: [1, 0.1]}"), "4: sweep.parameters.args.lr.float [1.0, 0.1]: the first must be below the second"),
        (parameter("{float: [0, 1], log: true}"), "4: sweep.parameters.args.lr.float [0.0, 1.0] with log: true: the lowest value must be above 0"),
        (parameter("{float: [1.0e-4]}"), "4: sweep.parameters.args.lr.float must be two numbers, the lowest and the highest: [1.0e-4, 1.0e-1]"),
        (parameter("{int: [1, 8.5]}"), "4: sweep.parameters.args.lr.int must be two whole numbers, the lowest and the highest: [1, 8]"),
        (parameter("{int: [1, 8], step: 2}"), "4: sweep.parameters.args.lr.step 2 does not divide the range: the last value is 7, not 8"),
        (parameter("{int: [1, 8], step: 0.5}"), "4: sweep.parameters.args.lr.step 0.5 must be a whole number, because the range is int"),
        (parameter("{float: [0, 1], step: 0}"), "4: sweep.parameters.args.lr.step 0 must be a number above 0"),
        (parameter("{int: [1, 9], step: 2, log: true}"), "4: sweep.parameters.args.lr.step conflicts with log: set only one of them"),
        (parameter("{choice: [1, 2, 1.0]}"), "4: sweep.parameters.args.lr.choice contains 1.0 twice"),
        (parameter("{choice: []}"), "4: sweep.parameters.args.lr.choice must be a list of values: [2, 4, 8]"),
        (parameter("{choice: [1, 2], log: true}"), "4: sweep.parameters.args.lr.log is for ranges, not for choices"),
        (parameter("{choice: [1, 2], int: [1, 2]}"), None),
        (parameter("{}"), "4: sweep.parameters.args.lr must have one of float, int, choice: {float: [1.0e-4, 1.0e-1], log: true}"),
        (parameter("{loguniform: [1, 2]}"), None),
        (parameter("{flaot: [1, 2], int: [1, 2]}"), "4: sweep.parameters.args.lr.flaot is not a known key (allowed: float, int, choice, log, step, when). Did you mean 'float'?"),
        ("parameters: {runtime.mixed_precision: {choice: [no, bf61]}}", "4: sweep.parameters.runtime.mixed_precision.choice.1 is not valid: runtime.mixed_precision 'bf61' is not valid (allowed: no, fp16, bf16, fp8). Did you mean 'bf16'?"),
        ("parameters: {keep: {int: [0, 4]}}", "4: sweep.parameters.keep.int 0 is not valid: checkpoint.keep 0 must be a whole number of at least 1"),
        ("parameters: {keep: {choice: [1, '1']}}", "4: sweep.parameters.keep.choice.1 1 is listed twice: it is the same as an earlier choice"),
        (f"method: grid\n{LR}", "5: sweep.parameters.args.lr is continuous, and a grid needs a finite list of values: add step, or use choice"),
        (f"method: baysian\n{LR}", "4: sweep.method 'baysian' is not valid (allowed: grid, random, tpe, gp, cmaes, qmc)"),
        (f"method: cmaes\n{LR}", "4: sweep.method cmaes needs at least two numeric parameters: use tpe or grid"),
        (f"n_trials: 5\n{LR}", None),
        (f"max_trails: 5\n{LR}\nmax_gpu_hours: 1", None),
        (f"{LR}\nmax_trials: null", "3: sweep has no limit: set max_trials or max_gpu_hours"),
        (f"{LR}\nmax_trials: 3\nrepeat: 4", "5: sweep.max_trials 3 is less than repeat (4), the number of trials of each point"),
        ("parameters: {runtime.seed: {choice: [1, 2]}}\nrepeat: 2", "5: sweep.repeat sets runtime.seed, which is also one of the parameters: remove one of the two"),
        (f"{LR}\nmetric: [loss, loss]\nmode: [min, min]", "5: sweep.metric contains 'loss' twice"),
        (f"{LR}\nmetric: [loss, seconds]", "3: sweep.mode must be a list of 2 values, one for each metric (loss, seconds)"),
        (f"{LR}\nmetric: loss\nmode: [min, max]", "6: sweep.mode must be one value, min or max, for the single metric loss"),
        (f"{LR}\nmode: minimise", "5: sweep.mode 'minimise' is not valid (allowed: min, max). Did you mean 'min'?"),
        (f"{LR}\nmetric: [a, b]\nmode: [min, max]\npruner: asha", "7: sweep.pruner cannot be combined with several metrics: a pruner compares trials by a single metric"),
        (f"method: cmaes\n{LR}\nmetric: [a, b]\nmode: [min, max]", "4: sweep.method cmaes supports only one metric: use tpe, gp, qmc, random or grid"),
        (f"{LR}\npruner: ahsa", "5: sweep.pruner 'ahsa' is not valid (allowed: asha, hyperband, median, none). Did you mean 'asha'?"),
        (f"{LR}\npruner: {{asha: {{grace_period: 3}}}}", "5: sweep.pruner.asha.grace_period is called min_steps here"),
        (f"{LR}\npruner: {{asha: {{min_stesp: 3}}}}", "5: sweep.pruner.asha.min_stesp is not a known key (allowed: min_steps, max_steps, reduction_factor). Did you mean 'min_steps'?"),
        (f"{LR}\npruner: {{asha: {{reduction_factor: 1}}}}", "5: sweep.pruner.asha.reduction_factor 1 must be a whole number of at least 2"),
        (f"{LR}\npruner: {{asha: {{min_steps: 9, max_steps: 9}}}}", "5: sweep.pruner.asha.min_steps 9 must be below max_steps (9)"),
        (f"{LR}\npruner: hyperband", "5: sweep.pruner.hyperband.max_steps is missing. Steps of a complete trial, as the program logs them. It determines the number of brackets."),
        (f"{LR}\npruner: {{asha: {{}}, median: {{}}}}", None),
        ("parameters: {args.a: {choice: [1, 2], when: {args.b: x}}}", "4: sweep.parameters.args.a.when.args.b is not one of the parameters (allowed: args.a). Did you mean 'args.a'?"),
        ("parameters: {args.a: {choice: [1, 2], when: {args.b: x}}, args.b: {choice: [y, z]}}", "4: sweep.parameters.args.a.when.args.b x is not a value of args.b (allowed: y, z)"),
        ("parameters: {args.a: {choice: [1, 2], when: {args.b: 0.5}}, args.b: {float: [0, 1]}}", "4: sweep.parameters.args.a.when.args.b is continuous: a condition needs a parameter with choices, whole numbers or a step"),
        ("parameters: {args.a: {choice: [1, 2], when: {args.b: 1}}, args.b: {choice: [1, 2], when: {args.a: 1}}}", "4: sweep.parameters.args.a.when forms a cycle: args.a → args.b → args.a"),
        ("method: gp\nparameters: {args.a: {choice: [1, 2], when: {args.b: 1}}, args.b: {choice: [1, 2]}}", "5: sweep.parameters.args.a.when is not supported by method gp: use tpe, random, qmc or grid"),
        (f"{LR}\nenqueue: [{{args.lr: 5}}]", "5: sweep.enqueue.0.args.lr 5 is outside the search space (float from 1e-4 to 0.1)"),
        (f"{LR}\nenqueue: [{{args.rl: 0.01}}]", "5: sweep.enqueue.0.args.rl is not one of the parameters (allowed: args.lr). Did you mean 'args.lr'?"),
        ("parameters: {args.d: {choice: [2, 4]}}\nenqueue: [{args.d: 2}, {args.d: 3}]", "5: sweep.enqueue.1.args.d 3 is outside the search space (allowed: 2, 4)"),
        ("parameters: {args.a: {choice: [1, 2], when: {args.b: 1}}, args.b: {choice: [1, 2]}}\nenqueue: [{args.a: 1, args.b: 2}]", "5: sweep.enqueue.0.args.a does not apply at this point: it needs args.b 1"),
    ],
)  # fmt: skip
def test_invalid_sweep_is_refused(problems: Callable[..., Sequence[str]], sweep: str, problem: str | None) -> None:
    lines = problems(sweep)
    assert len(lines) == 1, lines
    assert lines[0].startswith("sweep.yaml:")
    if problem is not None:
        assert lines[0] == f"sweep.yaml:{problem}"


def test_all_sweep_errors_are_reported_at_once(problems: Callable[..., Sequence[str]]) -> None:
    lines = problems(
        "method: grid\nparameters: {slurm.nodes: {choice: [1, 2]}, args.lr: {float: [1, 2]}, keep: {int: [0, 2]}}\nenqueue: [{args.x: 1}]"
    )
    assert len(lines) == 3


def test_parameter_for_an_args_list_is_refused(problems: Callable[..., Sequence[str]]) -> None:
    (line,) = problems(LR, head="name: g\nentrypoint: {script: train.py, args: [--lr, 3]}\n")
    assert (
        line
        == "sweep.yaml:4: sweep.parameters.args.lr entrypoint.args is a list here: set the whole list, entrypoint.args=[a, b]"
    )


@pytest.mark.parametrize(
    ("sweep", "note"),
    [
        ("method: grid\nparameters: {args.a: {int: [1, 50]}}", "the grid has 50 trials, but max_trials allows only the first 10"),
        (f"{LR}\nrepeat: 3", "max_trials 10 is not a multiple of repeat 3: 9 trials will run"),
        (f"{LR}\nworkers: 11", "at most 10 trials will run: only 10 of 11 workers will be started"),
        ("method: grid\nparameters: {args.a: {int: [1, 6]}}\nworkers: 8\npack: 2", "at most 6 trials will run: only 3 of 8 workers will be started"),
        (f"{LR}\nworkers: 5\npack: 2", None),  # all five workers get a trial
        ("parameters: {args.a: {choice: [1]}}", "the search space contains only one point: there is nothing to search"),
        (LR, None),
    ],
)  # fmt: skip
def test_notes_warn_of_trials_that_never_run_idle_workers_and_single_points(sweep: str, note: str | None) -> None:
    assert notes(load(sweep)) == ([] if note is None else [note])


def test_grid_without_max_trials_has_no_notes() -> None:
    assert notes(load("method: grid\nmax_trials: null\nparameters: {args.a: {int: [1, 50]}}")) == []


# -- JSON schema ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sweep", "fits"),
    [
        ({"metric": "loss", "parameters": {"args.lr": {"float": [0.1, 1], "log": True}}}, True),
        ({"metric": ["a", "b"], "mode": ["min", "max"], "pruner": {"asha": {"min_steps": 5}}, "parameters": {"a": {"choice": [1, None]}}}, True),
        ({"metric": "a", "pruner": "median", "parameters": {"a": {"int": [1, 2], "when": {"b": "x"}}}}, True),
        ({"parameters": {"a": {"int": [1, 2]}}}, False),
        ({"metric": "a", "pruner": "mean", "parameters": {"a": {"int": [1, 2]}}}, False),
        ({"metric": "a", "parameters": {"a": {"int": [1]}}}, False),
    ],
)  # fmt: skip
def test_sweep_schema_accepts_valid_and_rejects_invalid_sweeps(sweep: dict[str, Any], fits: bool) -> None:
    jsonschema.Draft202012Validator.check_schema(sweep_schema())
    values = {**yaml.safe_load(HEAD), "sweep": sweep}
    assert jsonschema.Draft202012Validator(sweep_schema()).is_valid(values) is fits
