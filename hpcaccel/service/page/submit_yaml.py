"""Edits of a spec's YAML text that keep its comments, order and spelling."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml
from yaml.nodes import CollectionNode, MappingNode, Node

from hpcaccel.errors import UserError
from hpcaccel.spec.yaml12 import PlainScalar, SourceLocation, parse_value, parse_yaml, resolve_plain

__all__ = ["flow_text", "lines_of", "value_from_text", "values_of", "with_value"]

Path = tuple[str, ...]

_BARE = re.compile(r"[A-Za-z_./~$][\w./@+=$~-]*(?: [\w./@+=$~-]+)*\Z")
_STEP = "  "


def values_of(text: str) -> dict[str, Any] | None:
    """The values in a spec's text as plain Python values; None if the text is not valid YAML or not a mapping."""
    document = parse_yaml(text, "spec")
    if document.problems or not isinstance(document.value, dict | None):
        return None
    return _plain(document.value or {})  # type: ignore[no-any-return]


def lines_of(text: str) -> dict[str, int]:
    """The line, counted from 1, of each key by its dotted path; empty if the text is not valid YAML."""
    places = parse_yaml(text, "spec").places
    return {".".join(map(str, path)): place.line for path, place in places.items() if place.line is not None}


def value_from_text(text: str) -> Any:
    """The value that ``text`` has in YAML, such as a list or a mapping that was typed into a field of the form.

    Raises:
        UserError: the text is not valid YAML.
    """
    document = parse_value(text, SourceLocation("field"))
    if document.problems:
        raise UserError(document.problems[0].message)
    return _plain(document.value)


def with_value(text: str, path: Path, value: Any) -> str:
    """The text with ``value`` at ``path``; None removes the key, and sections that are then empty.

    Only the lines of this key change. Texts with anchors or other rare constructs, in which such an edit would change
    other values as well, are written anew without their comments.

    Raises:
        UserError: the text is not valid YAML.
    """
    before = values_of(text)
    if before is None:
        raise UserError("the YAML is not valid: correct it first, or start again from an empty spec")
    wanted = _put(before, path, value)
    if wanted == before:
        return text
    root = _composed(text)
    if isinstance(root, MappingNode):
        edited = _removed(text, root, path) if value is None else _edited(text, root, path, value)
    else:
        edited = text.rstrip("\n") + ("\n" if text.strip() else "") + _block(_nested(path, value), "")
    return edited if values_of(edited) == wanted else _block(wanted, "")


def flow_text(value: Any) -> str:
    """A value as YAML in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(str(key))}: {flow_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow_text(item) for item in value) + "]"
    return _scalar(value)


def _plain(value: Any) -> Any:
    if isinstance(value, PlainScalar):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)  # YAML 1.2 contains JSON
    bare = _BARE.match(value) is not None and isinstance(resolve_plain(value), str)
    return value if bare and value.lower() not in _WORDS_OF_YAML_1_1 else json.dumps(value, ensure_ascii=False)


_WORDS_OF_YAML_1_1 = frozenset({"yes", "no", "on", "off", "y", "n"})


def _block(values: Mapping[str, Any], indent: str) -> str:
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value and indent == "":
            lines.append(f"{indent}{_scalar(key)}:\n{_block(value, indent + _STEP)}")
        else:
            lines.append(f"{indent}{_scalar(key)}: {flow_text(value)}\n")
    return "".join(lines)


def _nested(path: Path, value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def _put(values: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    changed, key = dict(values), path[0]
    if len(path) > 1:
        inside = changed.get(key)
        below = _put(inside if isinstance(inside, Mapping) else {}, path[1:], value)
        value = below or None
    if value is None:
        changed.pop(key, None)
    else:
        changed[key] = value
    return changed


def _composed(text: str) -> Node | None:
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _entry(node: MappingNode, key: str) -> tuple[Node, Node] | None:
    return next((pair for pair in node.value if pair[0].value == key), None)


def _end(node: Node) -> int:
    """Index of the end of a node's text. PyYAML's own mark of a block collection includes comments that follow it."""
    if not isinstance(node, CollectionNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _end(last[1] if isinstance(node, MappingNode) else last)


def _edited(text: str, node: MappingNode, path: Path, value: Any) -> str:
    found = _entry(node, path[0])
    if found is None:
        return _inserted(text, node, path, value)
    key, old = found
    if len(path) > 1 and isinstance(old, MappingNode) and old.value:
        return _edited(text, old, path[1:], value)
    if len(path) > 1:
        value = _nested(path[1:], value)
    start, end = int(key.end_mark.index), _end(old)
    tail = "\n" if text[start:end].endswith("\n") else ""
    if isinstance(value, Mapping) and value and not node.flow_style:
        indent = " " * (key.start_mark.column + len(_STEP))
        return f"{text[:start]}:\n{_block(value, indent).rstrip()}{tail}{text[end:]}"
    return f"{text[:start]}: {flow_text(value)}{tail}{text[end:]}"


def _inserted(text: str, node: MappingNode, path: Path, value: Any) -> str:
    if node.flow_style or not node.value:
        entries = [text[key.start_mark.index : _end(old)] for key, old in node.value]
        return _rewritten(text, node, [*entries, f"{_scalar(path[0])}: {flow_text(_inside(path, value))}"])
    indent = " " * node.start_mark.column
    end = _end(node)
    line_end = text.find("\n", max(0, end - 1) if text[:end].endswith("\n") else end)
    head, tail = (text + "\n", "") if line_end < 0 else (text[: line_end + 1], text[line_end + 1 :])
    is_section = not indent and (len(path) > 1 or isinstance(value, Mapping))
    gap = "\n" if is_section and not head.endswith("\n\n") else ""
    return head + gap + _block(_nested(path, value), indent) + tail


def _inside(path: Path, value: Any) -> Any:
    return _nested(path[1:], value) if len(path) > 1 else value


def _rewritten(text: str, node: MappingNode, entries: list[str]) -> str:
    """The text with other entries in a mapping that is written in braces."""
    return text[: node.start_mark.index] + "{" + ", ".join(entries) + "}" + text[_end(node) :]


def _removed(text: str, node: MappingNode, path: Path) -> str:
    found = _entry(node, path[0])
    if found is None:
        return text
    key, old = found
    if len(path) > 1 and isinstance(old, MappingNode) and not (len(old.value) == 1 and _is_alone(old, path[1:])):
        return _removed(text, old, path[1:])
    if node.flow_style:
        entries = [text[one.start_mark.index : _end(value)] for one, value in node.value if one is not key]
        return _rewritten(text, node, entries)
    start, end = text.rfind("\n", 0, key.start_mark.index) + 1, _end(old)
    line_end = text.find("\n", max(start, end - 1) if text[:end].endswith("\n") else end)
    rest = "" if line_end < 0 else text[line_end + 1 :]
    head = text[:start]
    if head.endswith("\n\n") and rest.startswith("\n"):
        rest = rest[1:]
    return head + rest


def _is_alone(node: Node, path: Path) -> bool:
    """Whether nothing is left of a mapping when the key at ``path`` is removed."""
    if not isinstance(node, MappingNode) or len(node.value) != 1 or node.value[0][0].value != path[0]:
        return False
    return len(path) == 1 or _is_alone(node.value[0][1], path[1:])
