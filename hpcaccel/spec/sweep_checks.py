"""What a sweep's section alone cannot know: whether it fits the job, and whether there is anything to search.

The result is the same section in one spelling: parameters in the order of their conditions, choices as the job spec
takes them, the same names everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcaccel.errors import SpecError
from hpcaccel.spec.expand import escape, expand
from hpcaccel.spec.fields import format_number
from hpcaccel.spec.job import JobSpec
from hpcaccel.spec.layers import Layer, put
from hpcaccel.spec.overrides import setting_path
from hpcaccel.spec.parameters import Parameter, same
from hpcaccel.spec.points import applies, contains, in_order, index_of, values
from hpcaccel.spec.problems import describe, did_you_mean
from hpcaccel.spec.sweep_fields import UNCONDITIONAL, Sweep
from hpcaccel.spec.trial_spec import MISSING, layer_of, value_at
from hpcaccel.spec.yaml12 import KeyPath

__all__ = ["checked"]

GRID = "`hpcaccel submit --grid` does that, with one job for each value"
_FIXED = {
    "slurm": f"is the allocation, which a worker keeps from trial to trial: {GRID}",
    "srun": f"belongs to how a worker starts its ranks, the same for all its trials: {GRID}",
    "environment": f"is made once in a worker, before its trials: give the program an argument (args.…), or {GRID}",
    "code": f"is the same for the whole sweep, which runs one copy of the code: {GRID}",
    "workdir": f"is the same for all trials of a sweep: {GRID}",
    "name": "names the folder of the whole sweep",
}
_PROGRAM = f"is the program of the whole sweep: search its arguments (args.…), or {GRID}"
_RESUMED = ("resilience.requeue", "resilience.chain", "resilience.chain_ahead")

Say = Callable[[KeyPath, str], None]
"""Notes a problem: where it stands, below ``sweep``, and what it is."""


def checked(sweep: Sweep, job: JobSpec, base: Path, say: Say) -> Sweep:
    """``sweep`` in its one spelling; what is wrong with it is said, and then the result may be anything.

    Args:
        base: the directory that paths among the choices start from.
    """
    layer = layer_of(job)
    paths = _paths(sweep, layer, say)
    parameters = _conditions({name: sweep.parameters[name] for name in paths}, paths, layer, say)
    parameters = {
        name: _tried(name, parameter, paths, parameters, layer, base, say) for name, parameter in parameters.items()
    }
    enqueue = [
        _enqueued(point, ("enqueue", index), parameters, paths, layer, base, say)
        for index, point in enumerate(sweep.enqueue)
    ]
    result = sweep.model_copy(update={"parameters": parameters, "enqueue": enqueue})
    if len(paths) == len(sweep.parameters):
        _whole(result, job, paths, say)
    return result


# -- paths ----------------------------------------------------------------------------------------------------------


def _paths(sweep: Sweep, layer: Layer, say: Say) -> dict[str, KeyPath]:
    """Where each parameter stands in the job spec; parameters that cannot are left out."""
    paths: dict[str, KeyPath] = {}
    for name in sweep.parameters:
        try:
            path = setting_path(name, layer)
        except SpecError as error:
            say(("parameters", name), _nearest(str(error).removeprefix(f"{name} "), name, layer))
            continue
        if advice := _fixed(path):
            say(("parameters", name), advice)
            continue
        other = next((known for known, place in paths.items() if _nested(place, path)), None)
        if other is None:
            paths[name] = path
        else:
            say(("parameters", name), f"is part of {other}, or the same: name one of them")
    return paths


def _nearest(message: str, name: str, layer: Layer) -> str:
    """The message, with the argument that is most like the name where no other key is."""
    args = layer.values["entrypoint"]["args"]
    if "Did you mean" in message or not isinstance(args, Mapping):
        return message
    return message.removesuffix(".") + did_you_mean(name, [f"args.{key}" for key in args])


def _fixed(path: KeyPath) -> str | None:
    """Why a path is the same for all trials, None where it is not."""
    if path[0] == "entrypoint" and path[1:2] != ("args",):
        return _PROGRAM
    if ".".join(map(str, path[:2])) in _RESUMED:
        return "says how the worker comes back, the same for all its trials"
    return _FIXED.get(str(path[0]))


def _nested(one: KeyPath, other: KeyPath) -> bool:
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _known(name: str, paths: Mapping[str, KeyPath], layer: Layer) -> str | None:
    """The parameter that ``name`` is another spelling of."""
    if name in paths:
        return name
    try:
        path = setting_path(name, layer)
    except SpecError:
        return None
    return next((known for known, place in paths.items() if place == path), None)


def _unknown(paths: Mapping[str, KeyPath], name: str) -> str:
    return f"is not one of the parameters (has: {', '.join(paths)}){did_you_mean(name, list(paths))}"


# -- conditions -----------------------------------------------------------------------------------------------------


def _conditions(
    parameters: Mapping[str, Parameter], paths: Mapping[str, KeyPath], layer: Layer, say: Say
) -> dict[str, Parameter]:
    """The parameters in the order of their conditions, those in the names of ``parameters``."""
    renamed = {}
    for name, parameter in parameters.items():
        when = {}
        for other, allowed in parameter.when.items():
            known = _known(other, paths, layer)
            if known is None:
                say(("parameters", name, "when", other), _unknown(paths, other))
            elif _possible(name, known, other, allowed, parameters[known], say):
                when[known] = allowed
        renamed[name] = parameter.model_copy(update={"when": when})
    ordered, circle = in_order(renamed)
    if circle:
        say(("parameters", circle[0], "when"), f"leads back to where it began: {' → '.join([*circle, circle[0]])}")
    return ordered


def _possible(name: str, known: str, other: str, allowed: list[Any], parameter: Parameter, say: Say) -> bool:
    """Whether a condition on ``known`` can ever hold."""
    place = ("parameters", name, "when", other)
    if values(parameter) is None:
        say(place, "has no end of values: conditions are for choices, whole numbers and steps")
        return False
    for value in allowed:
        if not contains(parameter, value):
            say(place, f"{_text(value)} is not a value of {known}{_allowed(parameter)}")
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
    say: Say,
) -> Parameter:
    """The parameter with its choices as the job spec takes them; each value is tried once."""
    given = {other: allowed[0] for other, allowed in _all_conditions(name, parameters).items()}
    ground = put(layer, [(paths[other], value) for other, value in given.items()])
    if parameter.choice is None:
        for value in parameter.range():
            if message := _refusal(ground, paths[name], value, base)[1]:
                say(("parameters", name, parameter.kind), f"{format_number(value)} is refused: {message}")
                break
        return parameter
    taken: list[Any] = []
    told: list[str] = []
    for index, value in enumerate(parameter.choice):
        kept, message = _refusal(ground, paths[name], value, base)
        if message:
            if message not in told:  # an unknown key is one for every value
                say(("parameters", name, "choice", index), f"is refused: {message}")
        elif any(same(kept, other) for other in taken):
            say(("parameters", name, "choice", index), f"{_text(value)} stands twice: it is the same as one before")
        taken.append(kept)
        told.append(message)
    return parameter.model_copy(update={"choice": taken})


def _all_conditions(name: str, parameters: Mapping[str, Parameter]) -> dict[str, list[Any]]:
    """The conditions of a parameter, and those of what they name."""
    found: dict[str, list[Any]] = {}
    for other, allowed in parameters[name].when.items():
        found |= {**_all_conditions(other, parameters), other: allowed}
    return found


def _refusal(ground: Layer, path: KeyPath, value: Any, base: Path) -> tuple[Any, str]:
    """The value as the job spec keeps it, and what is wrong with it there."""
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
    say: Say,
) -> dict[str, Any]:
    """A point to try first, in the names and the order of the parameters."""
    given: dict[str, tuple[str, Any]] = {}
    for name, value in point.items():
        known = _known(name, paths, layer)
        if known is None or known not in parameters:
            say((*place, name), _unknown(paths, name))
        elif known in given:
            say((*place, name), f"is {given[known][0]} once more")
        else:
            given[known] = (name, value)
    result: dict[str, Any] = {}
    for known, parameter in parameters.items():
        if known not in given:
            continue
        name, value = given[known]
        kept = _refusal(layer, paths[known], value, base)[0] if parameter.choice is not None else value
        if not contains(parameter, kept):
            say((*place, name), f"{_text(value)} lies outside the space{_allowed(parameter)}")
        elif parameter.when.keys() <= result.keys() and not applies(parameter, result):
            say((*place, name), f"does not apply there: it needs {_needs(parameter)}")
        result[known] = _kept(parameter, kept)
    return result


def _kept(parameter: Parameter, value: Any) -> Any:
    every = values(parameter)
    if every is None:
        return float(value) if isinstance(value, int) else value
    index = index_of(parameter, value)
    return value if index is None else every[index]


def _allowed(parameter: Parameter) -> str:
    if parameter.choice is not None:
        return f" (has: {', '.join(map(_text, parameter.choice[:20]))})"
    low, high = parameter.range()
    steps = f", in steps of {format_number(parameter.step)}" if parameter.step else ""
    return f" ({parameter.kind} from {format_number(low)} to {format_number(high)}{steps})"


def _needs(parameter: Parameter) -> str:
    return " and ".join(f"{name} {' or '.join(map(_text, allowed))}" for name, allowed in parameter.when.items())


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return format_number(value) if isinstance(value, int | float) else str(value)


# -- the sweep as a whole -------------------------------------------------------------------------------------------


def _whole(sweep: Sweep, job: JobSpec, paths: Mapping[str, KeyPath], say: Say) -> None:
    endless = [name for name, parameter in sweep.parameters.items() if values(parameter) is None]
    if sweep.method == "grid":
        for name in endless:
            say(("parameters", name), "has no end of values for a grid: give step, or choice")
    elif endless and sweep.max_trials is None and sweep.max_gpu_hours is None:
        say((), "has no end: set max_trials or max_gpu_hours")
    conditional = next((name for name, parameter in sweep.parameters.items() if parameter.when), None)
    if conditional is not None and sweep.method in UNCONDITIONAL:
        say(
            ("parameters", conditional, "when"),
            f"conditions are not for method {sweep.method}: use tpe, random, qmc or grid",
        )
    if sweep.method == "cmaes" and sum(parameter.kind != "choice" for parameter in sweep.parameters.values()) < 2:
        say(("method",), "cmaes needs two or more parameters that are numbers: use tpe, or grid")
    if sweep.max_trials is not None and sweep.max_trials < sweep.repeat:
        say(("max_trials",), f"{sweep.max_trials} is less than repeat ({sweep.repeat}): no point would be complete")
    if sweep.repeat > 1 and ("runtime", "seed") in paths.values():
        say(("repeat",), "sets runtime.seed itself, which is one of the parameters: use one of the two")
