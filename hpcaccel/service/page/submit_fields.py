"""The fields of the form, read from the JSON Schema of specs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcaccel.service.page.submit_yaml import flow_text

__all__ = ["FormField", "FormSection", "form_sections"]

Kind = Literal["choice", "flag", "integer", "number", "text", "scalar", "list", "value"]
"""``scalar``: text, a number, or a short list, as YAML reads it. ``value``: a list or a mapping in YAML."""

FIRST = (
    "name", "entrypoint.script", "entrypoint.module", "entrypoint.command", "entrypoint.args", "slurm.partition",
    "slurm.account", "slurm.nodes", "slurm.gpus_per_node", "slurm.ntasks_per_node", "slurm.cpus_per_task", "slurm.mem",
    "slurm.time",
)  # fmt: skip
"""The fields that most jobs need. They are shown together, above the sections."""


@dataclass(frozen=True, kw_only=True)
class FormField:
    """One field of the form."""

    path: tuple[str, ...]
    kind: Kind
    description: str
    default: Any = None
    choices: tuple[str, ...] = ()
    placeholder: str = ""

    @property
    def key(self) -> str:
        """The dotted path, as in messages and overrides."""
        return ".".join(self.path)


@dataclass(frozen=True, kw_only=True)
class FormSection:
    """A section of the form."""

    name: str
    description: str
    fields: tuple[FormField, ...]


def form_sections(schema: Mapping[str, Any]) -> list[FormSection]:
    """The sections of a spec's form: the fields that most jobs need, then the sections with their other fields."""
    definitions = schema.get("$defs", {})
    found: dict[str, list[FormField]] = {}
    about: dict[str, str] = {}
    for name, described in schema["properties"].items():
        _, inner = _kind_of(described, definitions)
        section = name if "properties" in inner else "other"
        about[section] = described.get("description", "") if section == name else "Keys at the top of the file."
        for one in _fields((name,), described, definitions):
            found.setdefault("first" if one.key in FIRST else section, []).append(one)
    first = sorted(found.pop("first", []), key=lambda one: FIRST.index(one.key))
    other = found.pop("other", [])
    sections = [FormSection(name=name, description=about[name], fields=tuple(fields)) for name, fields in found.items()]
    if other:
        sections.append(FormSection(name="other", description=about["other"], fields=tuple(other)))
    return [FormSection(name="first", description="", fields=tuple(first)), *sections]


def _fields(path: tuple[str, ...], described: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[FormField]:
    kind, inner = _kind_of(described, definitions)
    if "properties" in inner and len(path) < 3:
        for name, below in inner["properties"].items():
            yield from _fields((*path, name), below, definitions)
        return
    default = described.get("default")
    examples = described.get("examples") or inner.get("examples") or []
    yield FormField(
        path=path,
        kind=kind,
        description=described.get("description", ""),
        default=default,
        choices=tuple(map(str, inner.get("enum", ()))),
        placeholder=_shown(default) if default is not None else (f"such as {_shown(examples[0])}" if examples else ""),
    )


def _kind_of(described: Mapping[str, Any], definitions: Mapping[str, Any]) -> tuple[Kind, Mapping[str, Any]]:
    """The kind of a value, and the part of its schema that describes it."""
    if "$ref" in described:
        return _kind_of(definitions[described["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in described:
        options = [one for one in described["anyOf"] if one.get("type") != "null" and not _is_variable(one)]
        return _kind_of(options[0], definitions) if len(options) == 1 else (_common(options, definitions), {})
    if "enum" in described:
        return "choice", described
    types = described.get("type", "object")
    if isinstance(types, list):
        return ("value" if "object" in types else "scalar"), described
    if types == "array":
        items, _ = _kind_of(described.get("items", {}), definitions)
        return ("list" if items in ("text", "choice", "scalar") else "value"), described
    kinds: dict[str, Kind] = {"boolean": "flag", "integer": "integer", "number": "number", "string": "text"}
    return kinds.get(types, "value"), described


def _common(options: list[Mapping[str, Any]], definitions: Mapping[str, Any]) -> Kind:
    kinds = {_kind_of(one, definitions)[0] for one in options}
    if kinds <= {"integer", "number"}:
        return "number"
    if kinds <= {"text", "choice"}:
        return "text"
    return "value" if "value" in kinds else "scalar"


def _is_variable(described: Mapping[str, Any]) -> bool:
    """Whether this alternative is only a reference to an environment variable, which the YAML may have."""
    return described.get("type") == "string" and "env:" in described.get("pattern", "")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else flow_text(value)
