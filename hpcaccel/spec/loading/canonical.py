"""A spec as text: canonical JSON and its hash, readable YAML, and the JSON Schema of spec files for editors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hpcaccel.errors import SpecError
from hpcaccel.spec.job.job_spec import JobSpec
from hpcaccel.spec.loading.expand import escape
from hpcaccel.spec.loading.layers import Layer
from hpcaccel.spec.loading.overrides import section_by_name, section_of
from hpcaccel.spec.loading.problems import describe, report
from hpcaccel.spec.loading.spec_version import KEY, SPEC_VERSION
from hpcaccel.spec.yaml12 import FOREIGN_BREAK, NUMBERS

if TYPE_CHECKING:
    from hpcaccel.spec.sweep.sweep_fields import SweepSpec

__all__ = ["from_json", "schema", "spec_hash", "sweep_schema", "sweep_to_yaml", "to_json", "to_yaml", "write_yaml"]


_SHORT = 90
"""Maximum length in characters of a list or mapping that is written on one line."""


def to_json(spec: JobSpec) -> str:
    """The spec as one line of JSON, with all defaults written out.

    Keys keep the order of the model and of the user's mappings, because the order of arguments is significant.
    """
    return json.dumps(spec.model_dump(mode="json"), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> JobSpec:
    """Parse a spec that ``to_json`` wrote.

    Raises:
        SpecError: the text is not JSON or not a valid spec.
    """
    try:
        return JobSpec.model_validate(json.loads(text))
    except ValidationError as error:
        raise SpecError(report(describe(error, JobSpec, Layer({}), "spec.json"))) from None
    except ValueError as error:
        raise SpecError(f"spec.json is not valid JSON: {error}") from None


def spec_hash(spec: JobSpec) -> str:
    """SHA-256 of the canonical JSON, in hex."""
    return hashlib.sha256(to_json(spec).encode()).hexdigest()


def to_yaml(spec: JobSpec) -> str:
    """The spec as readable YAML, without settings that are empty and whose default is empty.

    Loading this text gives the same spec. The exceptions are a function as the entrypoint, and values that begin with a
    literal ``~/``: a file can express neither.
    """
    return _dumped(_shown(spec))


def sweep_to_yaml(spec: SweepSpec) -> str:
    """The sweep as readable YAML; see ``to_yaml``."""
    from hpcaccel.spec.sweep.sweep_fields import SweepFile  # slow to import: it builds the sweep models

    section = _written(spec.sweep.model_dump(mode="json"), SweepFile.model_fields["sweep"])
    section["parameters"] = {
        name: {key: value for key, value in parameter.items() if value not in (None, False, {})}
        for name, parameter in section["parameters"].items()
    }
    return _dumped({**_shown(spec.job), "sweep": section})


def _shown(spec: JobSpec) -> dict[str, Any]:
    values = spec.model_dump(mode="json")
    written = {name: _written(values[name], field) for name, field in JobSpec.model_fields.items()}
    return {name: value for name, value in written.items() if value not in (None, {})}


def _dumped(values: dict[str, Any]) -> str:
    return write_yaml(escape(values))


def write_yaml(values: dict[str, Any], *, compact: bool = False) -> str:
    """Plain values as YAML text that means the same in YAML 1.1 and 1.2. ``compact`` puts each short collection on one
    line."""
    return yaml.dump(
        values,
        Dumper=_CompactDumper if compact else _Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100_000,
        default_flow_style=False,
    )


def _written(value: Any, field: FieldInfo) -> Any:
    """The value of a field. In a section, settings that are empty (null, ``[]`` or ``{}``) and have this value by
    default are left out."""
    if (named := section_by_name(field.annotation)) is not None:
        return {name: _without_empty(item, named) for name, item in value.items()}
    section = section_of(field.annotation)
    return value if section is None or value is None else _without_empty(value, section)


def _without_empty(value: Any, section: type[BaseModel]) -> Any:
    fields = {item.alias or name: item for name, item in section.model_fields.items()}
    kept = {key: _written(item, fields[key]) for key, item in value.items()}
    return {key: item for key, item in kept.items() if item not in (None, [], {}) or item != _default(fields[key])}


def _default(field: FieldInfo) -> Any:
    section = section_of(field.annotation)
    if section is not None and field.default_factory is not None:
        return section()
    return field.get_default(call_default_factory=True)


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, and quotes text that YAML 1.1 or 1.2 would parse as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _CompactDumper(_Dumper):
    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        return super().represent_mapping(tag, mapping, flow_style=_is_short(mapping.values(), mapping))

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=_is_short(sequence, sequence))


def _is_short(items: Iterable[Any], whole: Any) -> bool:
    return not any(isinstance(item, dict | list) for item in items) and len(repr(whole)) <= _SHORT


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if FOREIGN_BREAK.search(value) else None)


_Dumper.add_representer(str, _text)
for _tag, _pattern in NUMBERS.items():
    _Dumper.add_implicit_resolver(_tag, _pattern, None)


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a job spec file, with a description for every key."""
    return _schema(JobSpec, "hpcaccel job spec")


def sweep_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a sweep file: a job spec with a section ``sweep``."""
    from hpcaccel.spec.sweep.sweep_fields import SweepFile  # slow to import, and other commands do not need it

    return _schema(SweepFile, "hpcaccel sweep")


def _schema(model: type[JobSpec], title: str) -> dict[str, Any]:
    result = model.model_json_schema(by_alias=True)
    for section in (result, *result["$defs"].values()):
        _allow_empty(section)
    del result["$defs"]["EntrypointSection"]["properties"]["function"]
    properties = {
        KEY: {
            "type": "integer",
            "minimum": 1,
            "maximum": SPEC_VERSION,
            "title": "Spec version",
            "description": "The version of the format of this file. Default: the newest one that hpcaccel reads.",
            "examples": [SPEC_VERSION],
        },
        "extends": {
            "type": "string",
            "title": "Extends",
            "description": "A base spec file, relative to this one. The settings of this file override those of the "
            "base.",
            "examples": ["base.yaml"],
        },
        **result["properties"],
    }
    # A file that extends another one may omit all required keys.
    required = result.pop("required")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **result,
        "title": title,
        "properties": properties,
        "anyOf": [{"required": required}, {"required": ["extends"]}],
    }


def _allow_empty(section: dict[str, Any]) -> None:
    """Allow null for lists, mappings and sections: a key without a value is valid."""
    for key, value in section["properties"].items():
        if "default" not in value and key not in section.get("required", []):
            about = {name: value.pop(name) for name in ("title", "description", "examples") if name in value}
            section["properties"][key] = {"anyOf": [value, {"type": "null"}], **about}
