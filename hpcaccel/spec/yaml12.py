"""YAML 1.2 text into plain values that remember where they stand.

PyYAML reads YAML 1.1, where ``time: 10:00`` is 600, ``account: 0123`` is 83, ``no`` is False and ``1e-3`` is text.
Here the scalars are those of YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema), and a number or a
boolean keeps its spelling beside its value: a field that wants text gets the text that the user wrote.
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

__all__ = ["Document", "KeyPath", "Place", "Plain", "Problem", "parse_value", "parse_yaml", "resolve_plain"]

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the root of a document to one value."""

MAX_VALUES = 100_000
"""More values than any spec has: a chain of aliases that doubles itself ends here."""

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:null|Null|NULL|~|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)
NUMBERS = {_TAG + "int": _INT, _TAG + "float": _FLOAT}
"""What a plain scalar must look like to be a number, by its tag."""

_MAX_DIGITS = 300
"""Longer ones stay text: no setting is such a number, and Python refuses to read the longest."""

_LIBYAML: Any = importlib.import_module("yaml.cyaml") if yaml.__with_libyaml__ else None
_LONG_TEXT = 50_000
_FEW_LEVELS = 400
_INDENTATION = re.compile(r"^(?:[ \t]|[-?:][ \t])*", re.MULTILINE)

FOREIGN_BREAK = re.compile("[\x85\u2028\u2029]")


@dataclass(frozen=True)
class Place:
    """Where a value was written, as an error names it: a file and its line, or an override."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class Problem(NamedTuple):
    """One thing that is wrong, and where."""

    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


@dataclass(frozen=True)
class Plain:
    """A number or a boolean together with its spelling in the file."""

    text: str
    value: bool | int | float

    def __str__(self) -> str:
        return self.text


@dataclass
class Document:
    """A parsed text: its value, the place of every key, and what was wrong."""

    value: Any
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _Resolver(BaseResolver):
    """Implicit tags by YAML 1.2's core schema, and the merge key of YAML 1.1, which everybody uses."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _name, _pattern in (
    ("null", _NULL),
    ("bool", _BOOL),
    ("int", _INT),
    ("float", _FLOAT),
    ("merge", re.compile("<<\\Z")),
):
    _Resolver.add_implicit_resolver(_TAG + _name, _pattern, [None])


class _Loader(Reader, Scanner, Parser, Composer, _Resolver):
    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        _Resolver.__init__(self)


if _LIBYAML is not None:

    class _FastLoader(_LIBYAML.CParser, _Resolver):  # type: ignore[misc]
        """The same nodes from libyaml, ten times sooner."""

        def __init__(self, text: str) -> None:
            _LIBYAML.CParser.__init__(self, text)
            _Resolver.__init__(self)


def _composed(text: str) -> Node | None:
    """The nodes of a text. PyYAML's own parser words mistakes better; libyaml's is for long texts without any."""
    if _LIBYAML is not None and len(text) > _LONG_TEXT and _is_flat(text):
        try:
            return _FastLoader(text).get_single_node()  # type: ignore[no-any-return]
        except yaml.YAMLError:
            pass  # said by the other one
    return _Loader(text).get_single_node()


def _is_flat(text: str) -> bool:
    """Whether nothing in it is nested deeply: libyaml's nodes are made by recursion in C, which knows no limit."""
    if text.count("[") + text.count("{") > _FEW_LEVELS:
        return False
    return max(len(found[0]) for found in _INDENTATION.finditer(text)) < _FEW_LEVELS


def parse_yaml(text: str, source: str) -> Document:
    """Parse one YAML document; ``source`` is the file's name in messages. Problems are collected, not raised."""
    match = FOREIGN_BREAK.search(text)
    if match:
        line = text.count("\n", 0, match.start()) + 1
        code = f"U+{ord(match[0]):04X}"
        escape = {"\x85": "\\x85", "\u2028": "\\u2028", "\u2029": "\\u2029"}[match[0]]
        message = f'{code} is a line break to some YAML readers and none to others: write "{escape}" in double quotes'
        return Document(None, problems=[Problem(Place(source, line), message)])
    return _parse(text, lambda line: Place(source, line))


def parse_value(text: str, place: Place) -> Document:
    """The value of an override: a flow collection or quoted text as in YAML, otherwise one plain scalar.

    Everything that YAML would treat specially in other places (``#``, ``: ``, ``*``, ``!``) stays as it is.
    """
    if text.startswith(("[", "{", '"', "'")):
        return _parse(text, lambda line: place)
    return Document(resolve_plain(text), {(): place})


def resolve_plain(text: str) -> str | Plain | None:
    """What an unquoted scalar means: None, a number or a boolean with its spelling, or text."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return Plain(text, text.lower() == "true")
    if _INT.match(text) and len(text) <= _MAX_DIGITS:
        return Plain(text, _integer(text))
    if _FLOAT.match(text) and len(text) <= _MAX_DIGITS:
        return Plain(text, _float(text))
    return text


def _integer(text: str) -> int:
    for prefix, base in (("0o", 8), ("0x", 16)):
        if text.startswith(prefix):
            return int(text[2:], base)
    return int(text)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _parse(text: str, place_of: Callable[[int], Place]) -> Document:
    document = Document(None)
    try:
        node = _composed(text)
        if node is not None:
            document.value = _Builder(document, place_of).build(node, ())
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"the character U+{error.character:04X} may not stand in YAML"
        document.problems.append(Problem(place_of(line), message))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        words = ", ".join(part for part in (error.context, error.problem) if part)
        document.problems.append(Problem(place_of(mark.line + 1 if mark else 1), f"not valid YAML: {words}"))
    except RecursionError:
        document.problems.append(Problem(place_of(1), "nested too deeply to be read"))
    return document


class _Builder:
    """Turns PyYAML's nodes into values, noting the place of each key and what is wrong on the way."""

    def __init__(self, document: Document, place_of: Callable[[int], Place]) -> None:
        self.document = document
        self.place_of = place_of
        self.open: set[int] = set()
        self.count = 0

    def place(self, node: Node) -> Place:
        return self.place_of(node.start_mark.line + 1)

    def problem(self, node: Node, message: str) -> None:
        self.document.problems.append(Problem(self.place(node), message))

    def tick(self, node: Node) -> None:
        self.count += 1
        if self.count > MAX_VALUES:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_VALUES} values", problem_mark=node.start_mark)

    def build(self, node: Node, path: KeyPath) -> Any:
        self.tick(node)
        if id(node) in self.open:
            raise yaml.MarkedYAMLError(problem="an alias stands inside what it names", problem_mark=node.start_mark)
        self.document.places.setdefault(path, self.place(node))
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
        if tag == "str" or tag == "merge":
            return text
        value = resolve_plain(text)
        if tag == "null" and value is None:
            return None
        if isinstance(value, Plain):
            if tag == "float" and not isinstance(value.value, bool):
                return Plain(text, float(value.value))
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
            self.document.places[below] = self.place(key_node)
            result[key] = self.build(value_node, below)
        return result

    def entries(self, node: MappingNode, path: KeyPath) -> list[tuple[str, Node, Node]]:
        """A mapping's own entries, preceded by those that its merge key brings and that it does not set itself."""
        own: dict[str, tuple[Node, Node]] = {}
        merged: dict[str, tuple[Node, Node]] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self.problem(key_node, "a key must be text")
                continue
            key = key_node.value
            if key_node.tag == _TAG + "merge":
                for name, source_key, source_value in self.merged(value_node, path):
                    merged.setdefault(name, (source_key, source_value))
            elif key in own:
                dotted = ".".join(str(part) for part in (*path, key))
                self.problem(key_node, f"{dotted} stands twice (first in line {own[key][0].start_mark.line + 1})")
            else:
                own[key] = (key_node, value_node)
        return [(key, nodes[0], nodes[1]) for key, nodes in {**merged, **own}.items()]

    def merged(self, node: Node, path: KeyPath) -> Iterator[tuple[str, Node, Node]]:
        sources = node.value if isinstance(node, SequenceNode) else [node]
        if id(node) in self.open:
            raise yaml.MarkedYAMLError(problem="an alias stands inside what it names", problem_mark=node.start_mark)
        self.open.add(id(node))
        for source in sources:
            self.tick(source)
            if isinstance(source, MappingNode) and id(source) not in self.open - {id(node)}:
                yield from self.entries(source, path)
            else:
                self.problem(source, "'<<' wants a mapping (an alias such as *defaults) or a list of them")
        self.open.discard(id(node))
