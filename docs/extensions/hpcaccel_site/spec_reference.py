"""Tables of the fields of spec files, sweep files and cluster profiles, made from their pydantic models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hpcaccel.spec import ClusterProfile, JobSpec, schema, sweep_schema
from hpcaccel_site.markdown import code, plain, table

__all__ = ["job_fields", "profile_fields", "sweep_fields"]

Schema = Mapping[str, Any]

_HEAD = ("key", "type", "default", "meaning")
_VARIABLE = r"^\$\{env:"
"""Beginning of the pattern of values such as ``${env:NAME}``, which every number accepts."""


def job_fields() -> str:
    """Markdown: the fields of a job spec; a section for each section of the file."""
    found = schema()
    required = [name for name, field in JobSpec.model_fields.items() if field.is_required()]
    return _Fields("spec", found["$defs"]).page({**found, "required": required})


def sweep_fields() -> str:
    """Markdown: the fields that a sweep file has in addition to those of a job spec."""
    found = sweep_schema()
    section = _Fields("sweep", found["$defs"], known=schema()["$defs"])
    top = {"properties": {"sweep": found["properties"]["sweep"]}, "required": ["sweep"]}
    return section.page(top)


def profile_fields() -> str:
    """Markdown: the fields of a cluster profile. Sections of the job spec are linked."""
    found = ClusterProfile.model_json_schema()
    return _Fields("profile", found.get("$defs", {}), known=schema()["$defs"]).page(found)


class _Fields:
    """The tables of one kind of file.

    Args:
        prefix: first part of all anchors: ``spec-slurm-nodes``.
        definitions: the schemas of the sections, by class name.
        known: sections that another page describes; they are linked, not repeated.
    """

    def __init__(self, prefix: str, definitions: Mapping[str, Schema], known: Mapping[str, Schema] = {}) -> None:
        self.prefix = prefix
        self.definitions = definitions
        self.known = known
        self.paths: dict[str, str] = {}
        """Path of the first key that has each section: ``SlurmSection``: ``slurm``."""

    def page(self, top: Schema) -> str:
        """The table of the top level, then one for each section, in the order of the keys."""
        self._find_sections(top, "")
        parts = [table(_HEAD, self._rows(top, ""))]
        for name, path in self.paths.items():
            section = self.definitions[name]
            about = plain(section.get("description", "").split("\n\n")[0].replace("``", "`"))
            head = f"({self._anchor(path)})=\n## {code(path)}\n\n{about}\n"
            parts.append(f"{head}\n{table(_HEAD, self._rows(section, path))}")
        return "\n".join(parts)

    def _anchor(self, path: str) -> str:
        words = path.lower().replace("_", "-").replace("<", "").replace(">", "").split(".")
        return "-".join([self.prefix, *words])

    def _find_sections(self, section: Schema, path: str) -> None:
        for key, field in section["properties"].items():
            for name, suffix in _references(field):
                if name not in self.paths and name not in self.known:
                    self.paths[name] = f"{path}.{key}{suffix}".lstrip(".")
                    self._find_sections(self.definitions[name], self.paths[name])

    def _rows(self, section: Schema, path: str) -> Iterator[tuple[str, str, str, str]]:
        required = section.get("required", ())
        for key, field in section["properties"].items():
            full = f"{path}.{key}".lstrip(".")
            kind = self._type(field)
            default = "required" if key in required else _default(field, kind)
            # The heading of a section has the anchor of its key.
            shown = code(key) if full in self.paths.values() else f"[{code(key)}]{{#{self._anchor(full)}}}"
            yield shown, kind, default, _meaning(field)

    def _type(self, field: Schema) -> str:
        found = dict.fromkeys(self._types(field))
        # A text may be written without quotes, as a number, and whatever has a default may be null.
        implied = {"null", *(("number", "integer", "true or false") if "text" in found else ())}
        return " or ".join(one for one in found if one not in implied)

    def _types(self, field: Schema) -> Iterator[str]:
        if "$ref" in field:
            yield self._link(field["$ref"].rpartition("/")[2])
        elif "enum" in field:
            yield from (code(_shown(one)) for one in field["enum"] if one is not None)
        elif "const" in field:
            yield code(_shown(field["const"]))
        elif "anyOf" in field:
            for one in field["anyOf"]:
                yield from self._types(one)
        elif not str(field.get("pattern", "")).startswith(_VARIABLE):
            kinds = field.get("type", "any")
            yield from (self._kind(kind, field) for kind in ([kinds] if isinstance(kinds, str) else kinds))

    def _kind(self, kind: str, field: Schema) -> str:
        if kind == "array":
            of = self._type(field["items"]) if field.get("items") else "values"
            return f"list of {of}"
        if kind == "object":
            values = field.get("additionalProperties") or next(iter(field.get("patternProperties", {}).values()), None)
            return f"mapping to {self._type(values)}" if isinstance(values, Mapping) and values else "mapping"
        return {"string": "text", "boolean": "true or false"}.get(kind, kind)

    def _link(self, name: str) -> str:
        if name in self.paths:
            return f"[section](#{self._anchor(self.paths[name])})"
        path = _Fields("spec", self.known)
        path._find_sections(schema(), "")
        return f"[as in a spec](spec.md#{path._anchor(path.paths[name])})"


def _references(field: Any, suffix: str = "") -> Iterator[tuple[str, str]]:
    """The sections that a field has, each with what follows the key in its path."""
    if not isinstance(field, Mapping):
        return
    if "$ref" in field:
        yield field["$ref"].rpartition("/")[2], suffix
    for one in field.get("anyOf", ()):
        yield from _references(one, suffix)
    yield from _references(field.get("items"), suffix)
    yield from _references(field.get("additionalProperties"), f"{suffix}.<name>")
    for one in field.get("patternProperties", {}).values():
        yield from _references(one, f"{suffix}.<name>")


def _default(field: Schema, kind: str) -> str:
    if "default" not in field:
        return "" if kind == "text" else "empty"
    return "null" if field["default"] is None else code(_shown(field["default"]))


def _meaning(field: Schema) -> str:
    text = plain(field.get("description", ""))
    if not field.get("examples"):
        return text
    return f"{text} Example: {code(_shown(field['examples'][0]))}."


def _shown(value: Any) -> str:
    """A value as YAML's flow style; the spelling of JSON, without quotes where YAML needs none."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return json.dumps(value)
