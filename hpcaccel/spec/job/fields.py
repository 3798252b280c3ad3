"""The base class of all sections of a spec, and the types of their fields.

Values come from YAML (numbers and booleans as ``PlainScalar``, with their spelling), from JSON, or from Python. The
message of a validator's ValueError completes a sentence that begins with the key and the value, added by ``problems``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from hpcaccel.spec.job import quantities
from hpcaccel.spec.job.node_counts import canonical_nodes
from hpcaccel.spec.yaml12 import PlainScalar, resolve_plain

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
    "ValueCheck",
    "Variable",
    "Whole",
    "Word",
    "below",
    "checked_text",
    "empty_list",
    "part_of",
    "section_field",
    "text_list",
]

MAX_TEXT_BYTES = 100_000
"""Maximum size of a text. Linux allows 131,072 bytes for one program argument, but quoting makes a text longer."""

_LINE_BREAK = re.compile(r"[\n\r]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

S = TypeVar("S", bound="Section")


class Conflict(NamedTuple):
    """A conflict between settings: the key to report, relative to its section, and the message."""

    key: str
    message: str


class ValueCheck(BeforeValidator):
    """A ``BeforeValidator`` whose function takes the value alone.

    pydantic inspects the signature of a validator for every field that has it, which makes up a third of the time that
    it needs to build the schema of a JobSpec.
    """

    def __get_pydantic_core_schema__(self, source_type: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        check = cast(Callable[[Any], Any], self.func)
        return core_schema.no_info_before_validator_function(check, schema=handler(source_type))


class Section(BaseModel):
    """A frozen part of a spec that rejects unknown keys."""

    model_config = ConfigDict(
        defer_build=True,  # most sections are only validated as a part of a JobSpec
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        model_title_generator=lambda model: model.__name__.removesuffix("Section"),
    )

    moved: ClassVar[dict[str, str]] = {}
    """Keys that users expect in this section, each with a message that names the correct setting."""

    rivals: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of mutually exclusive keys. In sections of ``layers._RIVALS``, a key replaces its rivals in base files."""

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        """Conflicts between ``values``, which may not be validated yet. Values of a wrong type are ignored."""
        found = []
        for group in cls.rivals:
            present = [key for key in group if values.get(key) is not None]
            choice = ", ".join(key for key in group if key != "function")
            found += [Conflict(key, f"conflicts with {present[0]}: set only one of {choice}") for key in present[1:]]
        return found

    @model_validator(mode="before")
    @classmethod
    def _empty_collections(cls, values: Any) -> Any:
        """Treat null as an empty collection: a key may have no value, as in ``env:`` with only comments below it."""
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


def empty_list() -> list[Any]:
    """An empty list, as a default. pydantic reads the signature of a factory, and that of ``list`` itself comes from
    text: reading it prepares Python's tokenizer, which takes 7 ms."""
    return []


def part_of(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The section ``key`` of ``values``, which may not be validated yet; empty if the section is not a mapping."""
    section = values.get(key)
    return dict(section) if isinstance(section, Section | Mapping) else {}


def section_field(description: str) -> Any:
    """A field for a section. If the section is left out, its fields have their defaults. The validator of the parent
    creates the section, so that pydantic builds no separate validator for it."""
    return Field(default_factory=dict, validate_default=True, description=description)


class Inside(ValueError):
    """An error inside a value with free structure, such as ``args``. ``path`` is the error's position in the value."""

    def __init__(self, message: str, path: tuple[str | int, ...]) -> None:
        self.path = path
        super().__init__(message)


@contextmanager
def below(key: Any) -> Iterator[None]:
    """Context manager: a ValueError raised in the block becomes an ``Inside`` error whose path begins with ``key``."""
    try:
        yield
    except ValueError as error:
        raise Inside(str(error), (key, *(error.path if isinstance(error, Inside) else ()))) from None


# -- text -----------------------------------------------------------------------------------------------------------


def checked_text(value: str) -> str:
    """Return ``value`` unchanged if it can be passed in a script and in the environment.

    Raises:
        ValueError: ``value`` contains a NUL, a line break or an invalid character, or is too long for an argument.
    """
    if "\0" in value:
        raise ValueError("contains a NUL character, which cannot be passed to a program")
    if _LINE_BREAK.search(value):
        raise ValueError("contains a line break: a value must be on one line")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ValueError(
            "is not valid text: it contains bytes that are not UTF-8, or half of a surrogate pair"
        ) from None
    if size > MAX_TEXT_BYTES:
        raise ValueError(f"is {size} bytes long (at most {MAX_TEXT_BYTES})")
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        value = "true" if value else "false"
    elif isinstance(value, int | float):
        value = quantities.format_number(value)
    elif isinstance(value, PlainScalar):
        value = value.text
    if value is None:
        raise ValueError("must be a string (write '' for an empty string)")
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return checked_text(value)


def _word(value: Any) -> str:
    text = _text(value)
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def _variable(value: Any) -> str:
    text = _text(value)
    if not _VARIABLE.fullmatch(text):
        raise ValueError(
            "is not a valid environment variable name: use letters, digits and '_', not starting with a digit"
        )
    return text


def _path(value: Any) -> str:
    return _word(str(value) if hasattr(value, "__fspath__") else value)


def _commas(value: Any) -> str:
    """Join the items of a list with commas, as sbatch expects."""
    return _word(",".join(_word(item) for item in value) if isinstance(value, list | tuple) else value)


_TEXT_SCHEMA = {"type": ["string", "number", "boolean"]}

Text = Annotated[str, ValueCheck(_text), WithJsonSchema(_TEXT_SCHEMA)]
"""One line of text, which may be empty. Numbers and booleans keep their spelling in the file."""

Word = Annotated[str, ValueCheck(_word), WithJsonSchema({"type": ["string", "number"], "minLength": 1})]
"""One non-empty line of text."""

Variable = Annotated[
    str, ValueCheck(_variable), WithJsonSchema({"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"})
]
"""The name of an environment variable."""

PathText = Annotated[str, ValueCheck(_path), WithJsonSchema({"type": "string", "minLength": 1})]
"""A path. Loading resolves most paths against the directory of the file (see ``loading.expand``)."""

CommaList = Annotated[
    str,
    ValueCheck(_commas),
    WithJsonSchema({"type": ["string", "number", "array"], "items": {"type": ["string", "number"]}}),
]
"""Words separated by commas; a list is accepted too."""


def text_list(description: str) -> Any:
    """A field for a list of texts that is empty by default."""
    return Field(default_factory=empty_list, description=description)


# -- numbers and booleans -------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """The value of a scalar. Text that was quoted or came from ``${env:NAME}`` is parsed as if it were unquoted."""
    if isinstance(value, str):
        value = resolve_plain(value)
    return value.value if isinstance(value, PlainScalar) else value


def _bounded(
    kind: type[int] | type[float], minimum: float = -math.inf, maximum: float = 2**62, *, above: float = -math.inf
) -> ValueCheck:
    """Validator for a number from ``minimum`` to ``maximum`` (inclusive) that is greater than ``above``."""
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

    return ValueCheck(validate)


def _number_schema(kind: str, **bounds: float) -> WithJsonSchema:
    reference = {"type": "string", "pattern": r"^\$\{env:[A-Za-z_][A-Za-z0-9_]*\}$"}
    return WithJsonSchema({"anyOf": [{"type": kind, **bounds}, reference]})


Whole = Annotated[int, _bounded(int), _number_schema("integer")]
Natural = Annotated[int, _bounded(int, 0), _number_schema("integer", minimum=0)]
"""An integer ≥ 0."""
Count = Annotated[int, _bounded(int, 1), _number_schema("integer", minimum=1)]
"""An integer ≥ 1."""
Seed = Annotated[int, _bounded(int, 0, 2**32 - 1), _number_schema("integer", minimum=0, maximum=2**32 - 1)]
"""A seed valid for Python, numpy and torch."""
Positive = Annotated[float, _bounded(float, above=0), _number_schema("number", exclusiveMinimum=0)]
"""A number above 0."""


def _flag(value: Any) -> bool:
    given = _plain(value)
    if not isinstance(given, bool):
        raise ValueError("must be true or false")
    return given


Flag = Annotated[bool, ValueCheck(_flag), WithJsonSchema({"type": "boolean"})]


def _requeue(value: Any) -> bool | str:
    given = _plain(value)
    if given == "expedite":
        return "expedite"
    if not isinstance(given, bool):
        raise ValueError("must be true, false or expedite")
    return given


Requeue = Annotated[
    bool | Literal["expedite"],
    ValueCheck(_requeue),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "expedite"}]}),
]
"""The value of ``resilience.requeue``: a boolean, or ``expedite``."""


# -- quantities -----------------------------------------------------------------------------------------------------


def _canonical(form: Callable[[str], str]) -> ValueCheck:
    return ValueCheck(lambda value: form(_text(value).strip()))


Time = Annotated[str, _canonical(quantities.canonical_time), WithJsonSchema({"type": ["string", "integer"]})]
Memory = Annotated[str, _canonical(quantities.canonical_memory), WithJsonSchema({"type": ["string", "number"]})]
Nodes = Annotated[str, _canonical(canonical_nodes), WithJsonSchema({"type": ["string", "integer"]})]
Gpus = Annotated[str, _canonical(quantities.canonical_gpus), WithJsonSchema({"type": ["string", "integer"]})]
Gres = Annotated[str, _canonical(quantities.canonical_gres), WithJsonSchema({"type": "string"})]
