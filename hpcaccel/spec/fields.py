"""The kinds of values that a spec's fields have.

Values come from YAML (numbers and booleans as ``Plain``, with their spelling), from JSON, or from Python. Validators
raise ValueError with words that continue "<key> <value> …"; ``problems`` adds where it stands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from hpcaccel.spec import quantities
from hpcaccel.spec.yaml12 import Plain, resolve_plain

__all__ = [
    "CommaList",
    "Conflict",
    "Count",
    "Flag",
    "Gpus",
    "Gres",
    "Inside",
    "Memory",
    "Natural",
    "Nodes",
    "PathText",
    "Positive",
    "Section",
    "Seed",
    "Text",
    "Time",
    "Variable",
    "Whole",
    "Word",
    "below",
    "checked_text",
    "format_number",
    "words",
]

MAX_TEXT_BYTES = 100_000
"""Linux refuses a program argument of more than 131,072 bytes; quoting needs some of the room."""

_LINE_BREAK = re.compile(r"[\n\r]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


S = TypeVar("S", bound="Section")


class Conflict(NamedTuple):
    """Settings that cannot stand together: the key that is named, relative to its section, and what is wrong."""

    key: str
    message: str


class Section(BaseModel):
    """A frozen part of the spec that knows all its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    moved: ClassVar[dict[str, str]] = {}
    """Keys that people look for here, and where they are to be set instead."""

    rivals: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of keys of which one may be set. A file that sets one of them overrules all of them in its base."""

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        """What cannot stand together in ``values`` (validated or as read). Values of a wrong type are passed over."""
        found = []
        for group in cls.rivals:
            present = [key for key in group if values.get(key) is not None]
            choice = ", ".join(key for key in group if key != "function")
            found += [Conflict(key, f"cannot stand beside {present[0]}: set one of {choice}") for key in present[1:]]
        return found

    @model_validator(mode="before")
    @classmethod
    def _empty_collections(cls, values: Any) -> Any:
        """``env:`` with nothing behind it (all lines commented out) is an empty one."""
        if not isinstance(values, Mapping):
            return values
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        return {
            key: value
            for key, value in values.items()
            if value is not None or key not in fields or fields[key].default_factory is None
        }

    @model_validator(mode="after")
    def _refuse_conflicts(self: S) -> S:
        for key, message in self.conflicts(dict(self)):
            raise PydanticCustomError("conflict", "{key} {message}", {"key": key, "message": message})
        return self


class Inside(ValueError):
    """A mistake inside a value of the user's own making, such as ``args``; ``path`` says where in it."""

    def __init__(self, message: str, path: tuple[str | int, ...]) -> None:
        self.path = path
        super().__init__(message)


@contextmanager
def below(key: Any) -> Iterator[None]:
    """Mistakes in the block are those of what stands at ``key``."""
    try:
        yield
    except ValueError as error:
        raise Inside(str(error), (key, *(error.path if isinstance(error, Inside) else ()))) from None


# -- text -----------------------------------------------------------------------------------------------------------


def checked_text(value: str) -> str:
    """``value`` itself, every character kept, if it can travel through a script and the environment.

    Raises:
        ValueError: it holds a NUL, a line break or what is no character, or is longer than a program argument may be.
    """
    if "\0" in value:
        raise ValueError("holds a NUL character, which no program can be given")
    if _LINE_BREAK.search(value):
        raise ValueError("holds a line break: a value must be one line")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ValueError("is not text: it holds bytes that are not UTF-8, or half of a surrogate pair") from None
    if size > MAX_TEXT_BYTES:
        raise ValueError(f"is {size} bytes long (at most {MAX_TEXT_BYTES})")
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        value = "true" if value else "false"
    elif isinstance(value, int | float):
        value = format_number(value)
    elif isinstance(value, Plain):
        value = value.text
    if value is None:
        raise ValueError("must be text (write '' for an empty one)")
    if not isinstance(value, str):
        raise ValueError("must be text")
    return checked_text(value)


def _word(value: Any) -> str:
    text = _text(value)
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def _variable(value: Any) -> str:
    text = _text(value)
    if not _VARIABLE.fullmatch(text):
        raise ValueError("is not the name of an environment variable (letters, digits and _, no digit first)")
    return text


def _path(value: Any) -> str:
    return _word(str(value) if hasattr(value, "__fspath__") else value)


def _commas(value: Any) -> str:
    """A list as one text with commas, as sbatch takes it."""
    return _word(",".join(_word(item) for item in value) if isinstance(value, list | tuple) else value)


_TEXT_SCHEMA = {"type": ["string", "number", "boolean"]}

Text = Annotated[str, BeforeValidator(_text), WithJsonSchema(_TEXT_SCHEMA)]
"""One line of text, may be empty. Numbers and booleans arrive with the spelling that they have in the file."""

Word = Annotated[str, BeforeValidator(_word), WithJsonSchema({"type": ["string", "number"], "minLength": 1})]
"""One line of text that is not empty."""

Variable = Annotated[
    str, BeforeValidator(_variable), WithJsonSchema({"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"})
]
"""The name of an environment variable."""

PathText = Annotated[str, BeforeValidator(_path), WithJsonSchema({"type": "string", "minLength": 1})]
"""A path; absolute once a file has been loaded, because it is resolved against that file."""

CommaList = Annotated[
    str,
    BeforeValidator(_commas),
    WithJsonSchema({"type": ["string", "number", "array"], "items": {"type": ["string", "number"]}}),
]
"""Several words with commas between them; may be written as a list."""


def words(description: str) -> Any:
    """A field that holds a list of non-empty lines, empty by default."""
    return Field(default_factory=list, description=description)


# -- numbers and booleans -------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """What a scalar means; text (from ``${env:NAME}``, or quoted) is read like an unquoted scalar."""
    if isinstance(value, str):
        value = resolve_plain(value)
    return value.value if isinstance(value, Plain) else value


def _bounded(
    kind: type[int] | type[float], minimum: float = -math.inf, maximum: float = 2**62, *, above: float = -math.inf
) -> BeforeValidator:
    """Checks a whole or real number against bounds; ``above`` is one that is not allowed itself."""
    bound = f" of at least {minimum}" if minimum > -math.inf else f" above {above}" if above > -math.inf else ""
    bound += f" and at most {maximum}" if maximum < 2**62 else ""
    message = f"must be {'a whole number' if kind is int else 'a number'}{bound}"

    def validate(value: Any) -> Any:
        given = _plain(value)
        if isinstance(given, bool) or not isinstance(given, int if kind is int else (int, float)):
            raise ValueError(message)
        if not (max(minimum, -(2**62)) <= given <= maximum and given > above):
            raise ValueError(message)
        return given

    return BeforeValidator(validate)


def _number_schema(kind: str, **bounds: float) -> WithJsonSchema:
    reference = {"type": "string", "pattern": r"^\$\{env:[A-Za-z_][A-Za-z0-9_]*\}$"}
    return WithJsonSchema({"anyOf": [{"type": kind, **bounds}, reference]})


Whole = Annotated[int, _bounded(int), _number_schema("integer")]
Natural = Annotated[int, _bounded(int, 0), _number_schema("integer", minimum=0)]
"""A whole number from 0 on."""
Count = Annotated[int, _bounded(int, 1), _number_schema("integer", minimum=1)]
"""A whole number from 1 on."""
Seed = Annotated[int, _bounded(int, 0, 2**32 - 1), _number_schema("integer", minimum=0, maximum=2**32 - 1)]
"""A seed that Python, numpy and torch all take."""
Positive = Annotated[float, _bounded(float, above=0), _number_schema("number", exclusiveMinimum=0)]
"""A number above 0."""


def _flag(value: Any) -> bool:
    given = _plain(value)
    if not isinstance(given, bool):
        raise ValueError("must be true or false")
    return given


Flag = Annotated[bool, BeforeValidator(_flag), WithJsonSchema({"type": "boolean"})]


def _requeue(value: Any) -> bool | str:
    given = _plain(value)
    if given == "expedite":
        return "expedite"
    if not isinstance(given, bool):
        raise ValueError("must be true, false or expedite")
    return given


Requeue = Annotated[
    bool | Literal["expedite"],
    BeforeValidator(_requeue),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "expedite"}]}),
]
"""Whether a job comes back, and as what."""


def format_number(value: int | float) -> str:
    """The text of a number for a command line: ``float()`` of it gives the same value.

    The shortest digits that do so. Below 1 in size, the shorter of both notations (``3e-4``, ``0.05``); from 1 on as
    Python writes it (``1.0``, ``1500.0``, ``1e16``).
    """
    text = repr(value)
    if isinstance(value, int) or not math.isfinite(value):
        return text
    if "e" not in text and (value == 0 or abs(value) >= 1):
        return text
    mantissa, exponent = _scientific(text)
    scientific = f"{mantissa}e{exponent}"
    return scientific if "e" in text or len(scientific) < len(text) else text


def _scientific(text: str) -> tuple[str, int]:
    """``0.00015`` as ("1.5", -4): the same digits, the point behind the first of them."""
    sign = "-" if text.startswith("-") else ""
    digits, _, power = text.lstrip("-").partition("e")
    whole, _, fraction = digits.partition(".")
    exponent = int(power or 0) + len(whole) - 1
    figures = whole + fraction
    leading = len(figures) - len(figures.lstrip("0"))
    figures = figures.lstrip("0").rstrip("0")
    rest = f".{figures[1:]}" if len(figures) > 1 else ""
    return f"{sign}{figures[0]}{rest}", exponent - leading


# -- quantities -----------------------------------------------------------------------------------------------------


def _canonical(form: Callable[[str], str]) -> BeforeValidator:
    return BeforeValidator(lambda value: form(_text(value).strip()))


Time = Annotated[str, _canonical(quantities.canonical_time), WithJsonSchema({"type": ["string", "integer"]})]
Memory = Annotated[str, _canonical(quantities.canonical_memory), WithJsonSchema({"type": ["string", "number"]})]
Nodes = Annotated[str, _canonical(quantities.canonical_nodes), WithJsonSchema({"type": ["string", "integer"]})]
Gpus = Annotated[str, _canonical(quantities.canonical_gpus), WithJsonSchema({"type": ["string", "integer"]})]
Gres = Annotated[str, _canonical(quantities.canonical_gres), WithJsonSchema({"type": "string"})]
