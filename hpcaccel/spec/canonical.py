"""A spec as text: canonical JSON for machines, with a hash, and YAML for people."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hpcaccel.errors import SpecError
from hpcaccel.spec.expand import escape
from hpcaccel.spec.job import JobSpec
from hpcaccel.spec.layers import Layer
from hpcaccel.spec.overrides import section_by_name, section_of
from hpcaccel.spec.problems import describe, report
from hpcaccel.spec.yaml12 import FOREIGN_BREAK, NUMBERS

if TYPE_CHECKING:
    from hpcaccel.spec.sweep_fields import SweepSpec

_SHORT = 90
"""Characters of a list or mapping that may stand on one line."""

__all__ = ["from_json", "spec_hash", "sweep_to_yaml", "to_json", "to_yaml", "write_yaml"]


def to_json(spec: JobSpec) -> str:
    """One line of JSON with every default written out: equal specs give equal text.

    Keys stand in the order of the model and of the user's own mappings, because the order of arguments counts.
    """
    return json.dumps(spec.model_dump(mode="json"), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> JobSpec:
    """The spec that ``to_json`` wrote.

    Raises:
        SpecError: it is no JSON, or no spec.
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
    """The whole spec for people. Settings that ask for nothing are left out.

    Loading it gives the same spec again, but for a value that begins with a literal ``~/``, which no file can say.
    """
    return _dumped(_shown(spec))


def sweep_to_yaml(spec: SweepSpec) -> str:
    """A sweep as ``to_yaml`` writes a job: loading it gives the same sweep again."""
    from hpcaccel.spec.sweep_fields import SweepFile  # whose models take time to build

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
    """Plain values as YAML that every reader takes for the same. ``compact``: short lists and mappings on one line."""
    return yaml.dump(
        values,
        Dumper=_CompactDumper if compact else _Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100_000,
        default_flow_style=False,
    )


def _written(value: Any, field: FieldInfo) -> Any:
    """A section without the settings that are empty by default and were left so."""
    if (named := section_by_name(field.annotation)) is not None:
        return {name: _without_empty(item, named) for name, item in value.items()}
    section = section_of(field.annotation)
    return value if section is None or value is None else _without_empty(value, section)


def _without_empty(value: Any, section: type[BaseModel]) -> Any:
    fields = {item.alias or name: item for name, item in section.model_fields.items()}
    kept = {key: _written(item, fields[key]) for key, item in value.items()}
    return {key: item for key, item in kept.items() if item not in (None, [], {}) or item != _default(fields[key])}


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, and quotes every text that YAML 1.1 or 1.2 could take for something else."""

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
