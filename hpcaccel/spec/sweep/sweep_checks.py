"""Checks of the section ``sweep``: parameters against the job spec, method and limits against the parameters.

The result is the section in canonical form: each parameter comes after those in its conditions, choices are as the job
spec stores them, and each parameter has the same name everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcaccel.core.formatting import did_you_mean
from hpcaccel.errors import SpecError
from hpcaccel.spec.job.job_spec import JobSpec
from hpcaccel.spec.job.quantities import format_number
from hpcaccel.spec.loading.expand import escape, expand
from hpcaccel.spec.loading.layers import Layer, put
from hpcaccel.spec.loading.overrides import setting_path
from hpcaccel.spec.loading.problems import describe
from hpcaccel.spec.sweep.parameters import Parameter, allowed_text, condition_text, same, value_text
from hpcaccel.spec.sweep.points import MISSING, applies, contains, in_order, index_of, layer_of, value_at, values
from hpcaccel.spec.sweep.sweep_fields import UNCONDITIONAL, SweepSection
from hpcaccel.spec.yaml12 import KeyPath

__all__ = ["checked"]

GRID = "use `hpcaccel submit --grid`, which submits one job for each value"
_FIXED = {
    "slurm": f"cannot be searched, because a worker keeps its allocation from trial to trial: {GRID}",
    "srun": f"cannot be searched, because a worker starts the ranks of all its trials in the same way: {GRID}",
    "environment": (
        "cannot be searched, because a worker sets it up once, before its trials: search an argument of the program "
        f"(args.…), or {GRID}"
    ),
    "code": f"cannot be searched, because all trials run the same copy of the code: {GRID}",
    "workdir": f"cannot be searched, because it is the same for all trials: {GRID}",
    "name": "cannot be searched, because it is the directory name of the whole sweep",
}
_PROGRAM = f"cannot be searched, because all trials run the same program: search its arguments (args.…), or {GRID}"
_RESUMED = ("resilience.requeue", "resilience.chain", "resilience.chain_ahead")

Report = Callable[[KeyPath, str], None]
"""Called with the path of a setting below ``sweep`` and a message: records this problem."""


def checked(sweep: SweepSection, job: JobSpec, base: Path, report: Report) -> SweepSection:
    """Check ``sweep`` and return the section in canonical form. If a problem is reported, the result is not valid.

    Args:
        base: the directory against which paths among the choices are resolved.
        report: called for each problem.
    """
    layer = layer_of(job)
    paths = _paths(sweep, layer, report)
    parameters = _conditions({name: sweep.parameters[name] for name in paths}, paths, layer, report)
    parameters = {
        name: _tried(name, parameter, paths, parameters, layer, base, report) for name, parameter in parameters.items()
    }
    enqueue = [
        _enqueued(point, ("enqueue", index), parameters, paths, layer, base, report)
        for index, point in enumerate(sweep.enqueue)
    ]
    result = sweep.model_copy(update={"parameters": parameters, "enqueue": enqueue})
    if len(paths) == len(sweep.parameters):
        _whole(result, job, paths, report)
    return result


# -- paths ----------------------------------------------------------------------------------------------------------


def _paths(sweep: SweepSection, layer: Layer, report: Report) -> dict[str, KeyPath]:
    """The path of each parameter in the job spec. Parameters that cannot be searched are reported and left out."""
    paths: dict[str, KeyPath] = {}
    for name in sweep.parameters:
        try:
            path = setting_path(name, layer)
        except SpecError as error:
            report(("parameters", name), _nearest(str(error).removeprefix(f"{name} "), name, layer))
            continue
        if advice := _fixed(path):
            report(("parameters", name), advice)
            continue
        other = next((known for known, place in paths.items() if _nested(place, path)), None)
        if other is None:
            paths[name] = path
        else:
            report(("parameters", name), f"overlaps with {other}: remove one of them")
    return paths


def _nearest(message: str, name: str, layer: Layer) -> str:
    """Add a suggestion, the argument closest to ``name``, to a message that has no suggestion yet."""
    args = layer.values["entrypoint"]["args"]
    if "Did you mean" in message or not isinstance(args, Mapping):
        return message
    return message.removesuffix(".") + did_you_mean(name, [f"args.{key}" for key in args])


def _fixed(path: KeyPath) -> str | None:
    """Why a setting must be the same for all trials, or None if it may differ."""
    if path[0] == "entrypoint" and path[1:2] != ("args",):
        return _PROGRAM
    if ".".join(map(str, path[:2])) in _RESUMED:
        return "cannot be searched, because it controls how a worker is requeued, which is the same for all its trials"
    return _FIXED.get(str(path[0]))


def _nested(one: KeyPath, other: KeyPath) -> bool:
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _known(name: str, paths: Mapping[str, KeyPath], layer: Layer) -> str | None:
    """The parameter to which ``name`` refers, in any spelling; None if there is no such parameter."""
    if name in paths:
        return name
    try:
        path = setting_path(name, layer)
    except SpecError:
        return None
    return next((known for known, place in paths.items() if place == path), None)


def _unknown(paths: Mapping[str, KeyPath], name: str) -> str:
    return f"is not one of the parameters (allowed: {', '.join(paths)}){did_you_mean(name, list(paths))}"


# -- conditions -----------------------------------------------------------------------------------------------------


def _conditions(
    parameters: Mapping[str, Parameter], paths: Mapping[str, KeyPath], layer: Layer, report: Report
) -> dict[str, Parameter]:
    """Sort the parameters so that each comes after those in its conditions. Also rename the parameters in conditions to
    the names that they have as keys."""
    renamed = {}
    for name, parameter in parameters.items():
        when = {}
        for other, allowed in parameter.when.items():
            known = _known(other, paths, layer)
            if known is None:
                report(("parameters", name, "when", other), _unknown(paths, other))
            elif _possible(name, known, other, allowed, parameters[known], report):
                when[known] = allowed
        renamed[name] = parameter.model_copy(update={"when": when})
    ordered, circle = in_order(renamed)
    if circle:
        report(("parameters", circle[0], "when"), f"forms a cycle: {' → '.join([*circle, circle[0]])}")
    return ordered


def _possible(name: str, known: str, other: str, allowed: list[Any], parameter: Parameter, report: Report) -> bool:
    """Whether a condition on ``known`` is valid: its values must be values of that parameter."""
    place = ("parameters", name, "when", other)
    if values(parameter) is None:
        report(place, "is continuous: a condition needs a parameter with choices, whole numbers or a step")
        return False
    for value in allowed:
        if not contains(parameter, value):
            report(place, f"{value_text(value)} is not a value of {known}{allowed_text(parameter)}")
            return False
    return True


# -- values ---------------------------------------------------------------------------------------------------------


def _tried(
    name: str,
    parameter: Parameter,
    paths: Mapping[str, KeyPath],
    parameters: Mapping[str, Parameter],
    layer: Layer,
    base: Path,
    report: Report,
) -> Parameter:
    """Validate each choice of a parameter, or both ends of its range, in the job spec. Returns the parameter with its
    choices as the spec stores them."""
    given = {other: allowed[0] for other, allowed in _all_conditions(name, parameters).items()}
    ground = put(layer, [(paths[other], value) for other, value in given.items()])
    if parameter.choice is None:
        for value in parameter.range():
            if message := _refusal(ground, paths[name], value, base)[1]:
                report(("parameters", name, parameter.kind), f"{format_number(value)} is not valid: {message}")
                break
        return parameter
    taken: list[Any] = []
    reported: list[str] = []
    for index, value in enumerate(parameter.choice):
        kept, message = _refusal(ground, paths[name], value, base)
        if message:
            if message not in reported:  # an unknown key gives the same message for every value
                report(("parameters", name, "choice", index), f"is not valid: {message}")
        elif any(same(kept, other) for other in taken):
            report(
                ("parameters", name, "choice", index),
                f"{value_text(value)} is listed twice: it is the same as an earlier choice",
            )
        taken.append(kept)
        reported.append(message)
    return parameter.model_copy(update={"choice": taken})


def _all_conditions(name: str, parameters: Mapping[str, Parameter]) -> dict[str, list[Any]]:
    """The conditions of a parameter and, recursively, of the parameters in its conditions."""
    found: dict[str, list[Any]] = {}
    for other, allowed in parameters[name].when.items():
        found |= {**_all_conditions(other, parameters), other: allowed}
    return found


def _refusal(ground: Layer, path: KeyPath, value: Any, base: Path) -> tuple[Any, str]:
    """Returns ``value`` as the job spec stores it, and the error message ("" if the value is valid)."""
    setting, found = expand(put(Layer({}), [(path, escape(value))]), base.absolute())
    if found:
        return value, found[0].message
    layer = put(ground, [(path, value_at(setting, path))])
    try:
        job = JobSpec.model_validate(layer.values)
    except ValidationError as error:
        return value, describe(error, JobSpec, layer, "spec")[0].message
    kept = value_at(layer_of(job), path)
    return (value if kept is MISSING else kept), ""


def _enqueued(
    point: Mapping[str, Any],
    place: KeyPath,
    parameters: Mapping[str, Parameter],
    paths: Mapping[str, KeyPath],
    layer: Layer,
    base: Path,
    report: Report,
) -> dict[str, Any]:
    """Check a point of ``enqueue``. Returns the point with the parameters' own names, in their order."""
    given: dict[str, tuple[str, Any]] = {}
    for name, value in point.items():
        known = _known(name, paths, layer)
        if known is None or known not in parameters:
            report((*place, name), _unknown(paths, name))
        elif known in given:
            report((*place, name), f"is the same parameter as {given[known][0]}")
        else:
            given[known] = (name, value)
    result: dict[str, Any] = {}
    for known, parameter in parameters.items():
        if known not in given:
            continue
        name, value = given[known]
        kept = _refusal(layer, paths[known], value, base)[0] if parameter.choice is not None else value
        if not contains(parameter, kept):
            report((*place, name), f"{value_text(value)} is outside the search space{allowed_text(parameter)}")
        elif parameter.when.keys() <= result.keys() and not applies(parameter, result):
            report((*place, name), f"does not apply at this point: it needs {condition_text(parameter)}")
        result[known] = _kept(parameter, kept)
    return result


def _kept(parameter: Parameter, value: Any) -> Any:
    every = values(parameter)
    if every is None:
        return float(value) if isinstance(value, int) else value
    index = index_of(parameter, value)
    return value if index is None else every[index]


# -- the sweep as a whole -------------------------------------------------------------------------------------------


def _whole(sweep: SweepSection, job: JobSpec, paths: Mapping[str, KeyPath], report: Report) -> None:
    endless = [name for name, parameter in sweep.parameters.items() if values(parameter) is None]
    if sweep.method == "grid":
        for name in endless:
            report(
                ("parameters", name), "is continuous, and a grid needs a finite list of values: add step, or use choice"
            )
    elif endless and sweep.max_trials is None and sweep.max_gpu_hours is None:
        report((), "has no limit: set max_trials or max_gpu_hours")
    conditional = next((name for name, parameter in sweep.parameters.items() if parameter.when), None)
    if conditional is not None and sweep.method in UNCONDITIONAL:
        report(
            ("parameters", conditional, "when"),
            f"is not supported by method {sweep.method}: use tpe, random, qmc or grid",
        )
    if sweep.method == "cmaes" and sum(parameter.kind != "choice" for parameter in sweep.parameters.values()) < 2:
        report(("method",), "cmaes needs at least two numeric parameters: use tpe or grid")
    if sweep.max_trials is not None and sweep.max_trials < sweep.repeat:
        report(
            ("max_trials",),
            f"{sweep.max_trials} is less than repeat ({sweep.repeat}), the number of trials of each point",
        )
    if sweep.repeat > 1 and ("runtime", "seed") in paths.values():
        report(("repeat",), "sets runtime.seed, which is also one of the parameters: remove one of the two")
