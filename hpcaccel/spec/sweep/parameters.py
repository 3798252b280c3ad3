"""A parameter of a sweep: its range or choices, and the conditions under which it applies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from hpcaccel.spec.job.entrypoint import argument_value
from hpcaccel.spec.job.fields import Conflict, Flag, Section, Word
from hpcaccel.spec.job.quantities import format_number
from hpcaccel.spec.yaml12 import PlainScalar, resolve_plain

__all__ = ["Parameter", "allowed_text", "condition_text", "same", "value_text", "values_of_condition"]

MAX_CHOICES = 10_000


def _number(value: Any) -> Any:
    value = resolve_plain(value) if isinstance(value, str) else value
    return value.value if isinstance(value, PlainScalar) else value


def _bounds(value: Any, kind: type[int] | type[float]) -> tuple[Any, Any]:
    what = "whole numbers" if kind is int else "numbers"
    example = "[1, 8]" if kind is int else "[1.0e-4, 1.0e-1]"
    given = [_number(item) for item in value] if isinstance(value, list | tuple) else []
    if len(given) != 2 or not all(_is_number(item, kind) for item in given):
        raise ValueError(f"must be two {what}, the lowest and the highest: {example}")
    low, high = (kind(item) for item in given)
    if low >= high:
        raise ValueError(f"{_shown(low, high)}: the first must be below the second")
    return low, high


def _is_number(value: Any, kind: type[int] | type[float]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return False
    return math.isfinite(value) and abs(value) < 2**62


def _shown(*values: float) -> str:
    return f"[{', '.join(format_number(value) for value in values)}]"


def _choices(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("must be a list of values: [2, 4, 8]")
    if len(value) > MAX_CHOICES:
        raise ValueError(f"has {len(value)} values (at most {MAX_CHOICES}): use a range, {{int: [low, high]}}")
    found: list[Any] = []
    for item in value:
        chosen = argument_value(item, "a choice")
        if any(same(chosen, other) for other in found):
            raise ValueError(f"contains {item} twice")
        found.append(chosen)
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal as settings: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(one, bool) or isinstance(other, bool) or type(one) is type(other):
        return type(one) is type(other) and bool(one == other)
    return isinstance(one, int | float) and isinstance(other, int | float) and one == other


def values_of_condition(value: Any) -> list[Any]:
    """The values for which a condition holds, as a list. ``value`` is one value or a list of values."""
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError("must contain at least one value")
        return [argument_value(item, "a value") for item in value]
    return [argument_value(value, "a value")]


def _step(value: Any) -> Any:
    given = _number(value)
    if given is not None and (not _is_number(given, float) or given <= 0):
        raise ValueError("must be a number above 0")
    return given


_PAIR = {"type": "array", "minItems": 2, "maxItems": 2}
FloatRange = Annotated[
    tuple[float, float],
    BeforeValidator(lambda value: _bounds(value, float)),
    WithJsonSchema({**_PAIR, "items": {"type": "number"}}),
]
IntRange = Annotated[
    tuple[int, int],
    BeforeValidator(lambda value: _bounds(value, int)),
    WithJsonSchema({**_PAIR, "items": {"type": "integer"}}),
]
Choices = Annotated[list[Any], BeforeValidator(_choices), WithJsonSchema({"type": "array", "minItems": 1})]
Step = Annotated[int | float | None, BeforeValidator(_step), WithJsonSchema({"type": ["number", "null"]})]
Condition = Annotated[list[Any], BeforeValidator(values_of_condition), WithJsonSchema({})]


class Parameter(Section):
    """The values of one parameter: exactly one of ``float``, ``int`` and ``choice``."""

    rivals: ClassVar[tuple[tuple[str, ...], ...]] = (("float", "int", "choice"),)
    moved: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("uniform", "range"), "is written {float: [low, high]} or {int: [low, high]}"),
        **dict.fromkeys(("loguniform", "log_uniform"), "is written {float: [low, high], log: true}"),
        **dict.fromkeys(("values", "choices", "categorical"), "is written {choice: [a, b, c]}"),
        **dict.fromkeys(("min", "max", "low", "high"), "is written {float: [low, high]} or {int: [low, high]}"),
    }

    float: FloatRange | None = Field(
        default=None,
        description="A range of real numbers: the lowest and the highest value.",
        examples=[[1.0e-4, 1.0e-1]],
    )
    int: IntRange | None = Field(
        default=None,
        description="A range of whole numbers: the lowest and the highest value, both included.",
        examples=[[1, 8]],
    )
    choice: Choices | None = Field(
        default=None, description="A list of values, of any type that the setting accepts.", examples=[[2, 4, 8]]
    )
    log: Flag = Field(
        default=False, description="Search the range on a logarithmic scale: each power of ten is equally likely."
    )
    step: Step = Field(default=None, description="Only the lowest value plus multiples of this step; null: all values.")
    when: dict[Word, Condition] = Field(
        default_factory=dict,
        description="The parameter applies only if these other parameters have one of the given values; otherwise the "
        "spec's own setting is used.",
        examples=[{"args.optimizer": "sgd"}, {"args.depth": [4, 8]}],
    )

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        if all(values.get(key) is None for key in cls.rivals[0]):
            found.append(Conflict("", "must have one of float, int, choice: {float: [1.0e-4, 1.0e-1], log: true}"))
        elif values.get("choice") is not None:
            found += [Conflict(key, "is for ranges, not for choices") for key in ("log", "step") if values.get(key)]
        else:
            found += _range_conflicts(values)
        return found

    @property
    def kind(self) -> Literal["float", "int", "choice"]:
        """Which of the three keys is set."""
        return "choice" if self.choice is not None else "int" if self.int is not None else "float"

    def range(self) -> tuple[Any, Any]:
        """Returns the lowest and the highest value. Must not be called for a ``choice``."""
        bounds = self.int or self.float
        assert bounds is not None
        return bounds


def allowed_text(parameter: Parameter) -> str:
    """The values of a parameter in parentheses, to append to an error message."""
    if parameter.choice is not None:
        more = ", …" if len(parameter.choice) > 20 else ""
        return f" (allowed: {', '.join(map(value_text, parameter.choice[:20]))}{more})"
    low, high = parameter.range()
    steps = f", in steps of {format_number(parameter.step)}" if parameter.step else ""
    return f" ({parameter.kind} from {format_number(low)} to {format_number(high)}{steps})"


def condition_text(parameter: Parameter) -> str:
    """The conditions of a parameter, for an error message: ``args.optimizer sgd and args.depth 4 or 8``."""
    return " and ".join(f"{name} {' or '.join(map(value_text, allowed))}" for name, allowed in parameter.when.items())


def value_text(value: Any) -> str:
    """A value of a parameter as it is written in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return format_number(value) if isinstance(value, int | float) else str(value)


def _range_conflicts(values: Mapping[str, Any]) -> list[Conflict]:
    """Conflicts of ``log`` and ``step``, which may not be validated yet, with the range; none for an invalid range."""
    kind = "int" if values.get("int") is not None else "float"
    bounds, log, step = values.get(kind), _number(values.get("log")), _number(values.get("step"))
    if not (isinstance(bounds, tuple) and len(bounds) == 2):
        return []
    low, high = bounds
    found = []
    if log is True and low <= 0:
        found.append(Conflict(kind, f"{_shown(low, high)} with log: true: the lowest value must be above 0"))
    if step is None or not _is_number(step, float):
        return found
    if log is True:
        found.append(Conflict("step", "conflicts with log: set only one of them"))
    if kind == "int" and step != int(step):
        found.append(Conflict("step", f"{format_number(step)} must be a whole number, because the range is int"))
    elif (rest := (Decimal(str(high)) - Decimal(str(low))) % Decimal(str(step))) != 0:
        last = float(Decimal(str(high)) - rest)
        shown = format_number(int(last) if kind == "int" else last)
        found.append(
            Conflict(
                "step",
                f"{format_number(step)} does not divide the range: the last value is {shown}, not "
                f"{format_number(high)}",
            )
        )
    return found
