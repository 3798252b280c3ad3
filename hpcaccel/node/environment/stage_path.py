"""Where staged data lies on a node."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel.errors import RankEnvironmentError

__all__ = ["STAGE_DIR", "Stage", "read_stage", "stage_directory"]

STAGE_DIR = "HPCACCEL_STAGE_DIR"
"""Variable of the ranks: the folder on the node's own disk with a copy of each source under its own name."""

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The ``stage`` part of ``spec.json``."""

    sources: list[str]
    directory: str | None = None
    keep: bool = False


def read_stage(document: Mapping[str, Any] | None) -> Stage | None:
    return None if document is None else Stage(**document)


def stage_directory(stage: Stage, env: Mapping[str, str]) -> Path:
    """The folder of this job's copies: the same path on every node.

    Raises:
        RankEnvironmentError: it is named by a variable that the job does not have.
    """
    base = stage.directory or env.get("SLURM_TMPDIR") or env.get("TMPDIR") or "/tmp"

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not env.get(name):
            raise RankEnvironmentError(
                f"stage.directory {base!r}: ${name} is not set in this job. Name a folder that is on every node"
            )
        return env[name]

    place = Path(_VARIABLE.sub(value, base))
    if not place.is_absolute():
        raise RankEnvironmentError(f"stage.directory {base!r} is {str(place)!r} in this job, and no absolute path")
    return place / f"hpcaccel-stage-{os.getuid()}-{_key(stage, env)}"


def _key(stage: Stage, env: Mapping[str, str]) -> str:
    if not stage.keep:
        array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID") or env["HPCACCEL_LOCAL_JOB"]
    return hashlib.sha256(json.dumps(stage.sources).encode()).hexdigest()[:16]
