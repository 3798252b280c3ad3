"""Parser for YAML 1.2: plain values, with the source location of each.

PyYAML reads YAML 1.1, where ``time: 10:00`` is 600, ``account: 0123`` is 83, ``no`` is False and ``1e-3`` is text.
This parser uses the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema). Numbers and booleans keep
their spelling, so that a text field gets the text that the user wrote.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

__all__ = [
    "Document",
    "KeyPath",
    "PlainScalar",
    "Problem",
    "SourceLocation",
    "parse_value",
    "parse_yaml",
    "resolve_plain",
]

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the root of a document to one value."""

MAX_VALUES = 100_000
"""Maximum number of values in a document, more than any spec has. The limit stops aliases that expand exponentially."""

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:null|Null|NULL|~|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)
NUMBERS = {_TAG + "int": _INT, _TAG + "float": _FLOAT}
"""Patterns of plain scalars that are numbers, by tag."""

_MAX_DIGITS = 300
"""Maximum length of a number, in characters. Longer numbers stay text: Python limits how many digits it converts."""

_LIBYAML: Any = importlib.import_module("yaml.cyaml") if yaml.__with_libyaml__ else None
_LONG_TEXT = 50_000
_FEW_LEVELS = 400
_INDENTATION = re.compile(r"^(?:[ \t]|[-?:][ \t])*", re.MULTILINE)
FOREIGN_BREAK = re.compile("[\x85\u2028\u2029]")


@dataclass(frozen=True)
class SourceLocation:
    """The origin of a value, for messages: a file and line, or an override."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class Problem(NamedTuple):
    """An error message, and the location of the value that it is about."""

    place: SourceLocation
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


@dataclass(frozen=True)
class PlainScalar:
    """A number or a boolean, together with its spelling in the file."""

    text: str
    value: bool | int | float

    def __str__(self) -> str:
        return self.text


@dataclass
class Document:
    """A parsed document: its value, the location of every key, and the problems found."""

    value: Any
    places: dict[KeyPath, SourceLocation] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _Resolver(BaseResolver):
    """Resolver for the implicit tags of YAML 1.2's core schema, and for the widely used merge key of YAML 1.1."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern in {
    _TAG + "null": _NULL,
    _TAG + "bool": _BOOL,
    **NUMBERS,
    _TAG + "merge": re.compile(r"<<\Z"),
}.items():
    _Resolver.add_implicit_resolver(_tag, _pattern, [None])


class _Loader(Reader, Scanner, Parser, Composer, _Resolver):
    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        for base in (Scanner, Parser, Composer, _Resolver):
            base.__init__(self)


if _LIBYAML is not None:

    class _FastLoader(_LIBYAML.CParser, _Resolver):  # type: ignore[misc]
        """Builds the same nodes as ``_Loader``, but with libyaml, which is ten times faster."""

        def __init__(self, text: str) -> None:
            _LIBYAML.CParser.__init__(self, text)
            _Resolver.__init__(self)


def _composed(text: str) -> Node | None:
    """The root node of a text. Long texts are parsed with libyaml, which is faster but has worse error messages."""
    if _LIBYAML is not None and len(text) > _LONG_TEXT and _is_flat(text):
        try:
            return _FastLoader(text).get_single_node()  # type: ignore[no-any-return]
        except yaml.YAMLError:
            pass  # PyYAML's own parser reports the error
    return _Loader(text).get_single_node()


def _is_flat(text: str) -> bool:
    """Whether the text has no deep nesting: libyaml builds nodes by recursion in C without a depth limit."""
    if text.count("[") + text.count("{") > _FEW_LEVELS:
        return False
    return max(len(found[0]) for found in _INDENTATION.finditer(text)) < _FEW_LEVELS


def parse_yaml(text: str, source: str) -> Document:
    """Parse one YAML document; ``source`` is the file's name in messages. Problems are collected, not raised."""
    if match := FOREIGN_BREAK.search(text):
        line = text.count("\n", 0, match.start()) + 1
        escape = {"\x85": "\\x85", "\u2028": "\\u2028", "\u2029": "\\u2029"}[match[0]]
        code = f"U+{ord(match[0]):04X}"
        message = f'{code} is a line break for some YAML parsers and not for others: write "{escape}" in double quotes'
        return Document(None, problems=[Problem(SourceLocation(source, line), message)])
    return _parse(text, lambda line: SourceLocation(source, line))


def parse_value(text: str, place: SourceLocation) -> Document:
    """Parse the value of an override: a flow collection or quoted text in YAML syntax, otherwise one plain scalar.

    A plain scalar keeps the characters that are special in YAML (``#``, ``: ``, ``*``, ``!``).
    """
    if text.startswith(("[", "{", '"', "'")):
        return _parse(text, lambda line: place)
    return Document(resolve_plain(text), {(): place})


def resolve_plain(text: str) -> str | PlainScalar | None:
    """The value of an unquoted scalar: None, a number or boolean together with its spelling, or text."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return PlainScalar(text, text.lower() == "true")
    if _INT.match(text) and len(text) <= _MAX_DIGITS:
        return PlainScalar(text, int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)))
    if _FLOAT.match(text) and len(text) <= _MAX_DIGITS:
        return PlainScalar(text, float(text.lower().replace(".inf", "inf").replace(".nan", "nan")))
    return text


def _parse(text: str, place_of: Callable[[int], SourceLocation]) -> Document:
    document = Document(None)
    try:
        node = _composed(text)
        if node is not None:
            document.value = _Builder(document, place_of).build(node, ())
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"the character U+{error.character:04X} is not allowed in YAML"
        document.problems.append(Problem(place_of(line), message))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        document.problems.append(Problem(place_of(mark.line + 1 if mark else 1), f"not valid YAML: {message}"))
    except RecursionError:
        document.problems.append(Problem(place_of(1), "nested too deeply"))
    return document


class _Builder:
    """Turns PyYAML's nodes into values, and records the location of each key and all problems."""

    def __init__(self, document: Document, place_of: Callable[[int], SourceLocation]) -> None:
        self.document = document
        self.place_of = place_of
        self.open: set[int] = set()
        self.count = 0

    def problem(self, node: Node, message: str) -> None:
        self.document.problems.append(Problem(self.place_of(node.start_mark.line + 1), message))

    def tick(self, node: Node) -> None:
        self.count += 1
        if self.count > MAX_VALUES:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_VALUES} values", problem_mark=node.start_mark)

    def build(self, node: Node, path: KeyPath) -> Any:
        self.tick(node)
        if id(node) in self.open:
            raise yaml.MarkedYAMLError(problem="an alias is inside its own value", problem_mark=node.start_mark)
        self.document.places.setdefault(path, self.place_of(node.start_mark.line + 1))
        if isinstance(node, ScalarNode):
            return self.scalar(node)
        self.open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return self.sequence(node, path)
            assert isinstance(node, MappingNode)
            return self.mapping(node, path)
        finally:
            self.open.discard(id(node))

    def scalar(self, node: ScalarNode) -> Any:
        tag = node.tag.removeprefix(_TAG)
        text: str = node.value
        if tag in ("str", "merge"):
            return text
        value = resolve_plain(text)
        if tag == "null" and value is None:
            return None
        if isinstance(value, PlainScalar):
            if tag == "float" and not isinstance(value.value, bool):
                return PlainScalar(text, float(value.value))
            if tag == {bool: "bool", int: "int", float: "float"}[type(value.value)]:
                return value
        elif isinstance(value, str) and tag in ("int", "float") and node.style is None and len(text) > _MAX_DIGITS:
            return text
        self.problem(node, f"{text!r} cannot have the tag {node.tag.replace(_TAG, '!!')}")
        return text

    def sequence(self, node: SequenceNode, path: KeyPath) -> list[Any]:
        if node.tag != _TAG + "seq":
            self.problem(node, f"a list cannot have the tag {node.tag.replace(_TAG, '!!')}")
        return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]

    def mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        if node.tag != _TAG + "map":
            self.problem(node, f"a mapping cannot have the tag {node.tag.replace(_TAG, '!!')}")
        result: dict[str, Any] = {}
        for key, key_node, value_node in self.entries(node, path):
            below = (*path, key)
            self.document.places[below] = self.place_of(key_node.start_mark.line + 1)
            result[key] = self.build(value_node, below)
        return result

    def entries(self, node: MappingNode, path: KeyPath) -> list[tuple[str, Node, Node]]:
        """The entries of a mapping, after the entries from its merge key. The mapping's own entries take precedence."""
        own: dict[str, tuple[Node, Node]] = {}
        merged: dict[str, tuple[Node, Node]] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self.problem(key_node, "a key must be a string")
                continue
            key = key_node.value
            if key_node.tag == _TAG + "merge":
                for name, source_key, source_value in self.merged(value_node, path):
                    merged.setdefault(name, (source_key, source_value))
            elif key in own:
                dotted = ".".join(str(part) for part in (*path, key))
                self.problem(key_node, f"{dotted} is set twice (first on line {own[key][0].start_mark.line + 1})")
            else:
                own[key] = (key_node, value_node)
        return [(key, nodes[0], nodes[1]) for key, nodes in {**merged, **own}.items()]

    def merged(self, node: Node, path: KeyPath) -> Iterator[tuple[str, Node, Node]]:
        sources = node.value if isinstance(node, SequenceNode) else [node]
        if id(node) in self.open:
            raise yaml.MarkedYAMLError(problem="an alias is inside its own value", problem_mark=node.start_mark)
        self.open.add(id(node))
        for source in sources:
            self.tick(source)
            if isinstance(source, MappingNode) and id(source) not in self.open - {id(node)}:
                yield from self.entries(source, path)
            else:
                self.problem(source, "'<<' needs a mapping (an alias such as *defaults) or a list of mappings")
        self.open.discard(id(node))
