"""The JSON Schema of a spec file: what an editor completes and checks while it is written."""

from __future__ import annotations

from typing import Any

from hpcaccel.spec.job import JobSpec

__all__ = ["schema", "sweep_schema"]


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a job spec file, with a description for every key."""
    return _schema(JobSpec, "hpcaccel job spec")


def sweep_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a sweep's file: a job spec with a section ``sweep``."""
    from hpcaccel.spec.sweep_fields import SweepFile  # other commands do without it

    return _schema(SweepFile, "hpcaccel sweep")


def _schema(model: type[JobSpec], title: str) -> dict[str, Any]:
    result = model.model_json_schema(by_alias=True)
    for section in (result, *result["$defs"].values()):
        _allow_empty(section)
    del result["$defs"]["Entrypoint"]["properties"]["function"]
    properties = {
        "extends": {
            "type": "string",
            "title": "Extends",
            "description": "Another spec file, relative to this one, that this one is laid over.",
            "examples": ["base.yaml"],
        },
        **result["properties"],
    }
    # A file that extends another may leave everything to it.
    required = result.pop("required")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **result,
        "title": title,
        "properties": properties,
        "anyOf": [{"required": required}, {"required": ["extends"]}],
    }


def _allow_empty(section: dict[str, Any]) -> None:
    """A list, mapping or section may have nothing behind its key."""
    for key, value in section["properties"].items():
        if "default" not in value and key not in section.get("required", []):
            about = {name: value.pop(name) for name in ("title", "description", "examples") if name in value}
            section["properties"][key] = {"anyOf": [value, {"type": "null"}], **about}
