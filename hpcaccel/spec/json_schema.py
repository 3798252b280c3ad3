"""The JSON Schema of a spec file: what an editor completes and checks while it is written."""

from __future__ import annotations

from typing import Any

from hpcaccel.spec.job import JobSpec

__all__ = ["schema"]


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a job spec file, with a description for every key."""
    result = JobSpec.model_json_schema(by_alias=True)
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
        "title": "hpcaccel job spec",
        "properties": properties,
        "anyOf": [{"required": required}, {"required": ["extends"]}],
    }
