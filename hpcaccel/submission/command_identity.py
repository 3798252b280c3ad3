"""What makes two submissions the same: given again with nothing changed, specs, resources, code and place."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

from hpcaccel.spec import spec_hash
from hpcaccel.submission.code_copy import CodePlan
from hpcaccel.submission.prepare import Prepared

__all__ = ["command_of"]


def command_of(submissions: Sequence[Prepared], *, more: str = "") -> dict[str, Any]:
    """For :func:`hpcaccel.submission.idempotent.asked_for`.

    Args:
        submissions: of one command.
        more: what the specs of the runs do not say.
    """
    ids = [one.run.run_id for one in submissions]
    return {"runs": [_of_run(one, ids) for one in submissions], "more": more}


def _of_run(prepared: Prepared, ids: Sequence[str]) -> dict[str, Any]:
    parts = "\0".join([prepared.script, *(spec_hash(task.spec) for task in prepared.tasks), *map(str, prepared.after)])
    for number, run_id in enumerate(ids):
        parts = parts.replace(run_id, f"RUN{number}")  # the ids are new ones each time
    return {
        "folder": str(prepared.run.path.parent),
        "cluster": prepared.cluster,
        "made of": hashlib.sha256(parts.encode()).hexdigest(),
        "code": "" if prepared.code is None else _of_code(prepared.code),
        "function": hashlib.sha256(prepared.function or b"").hexdigest(),
    }


def _of_code(plan: CodePlan) -> str:
    """Sizes and times: to read all files would take as long as copying them."""
    found = hashlib.sha256(str(plan.root).encode())
    for name in plan.files:
        try:
            one = os.lstat(plan.root / name)
        except OSError:
            continue  # copying says so
        found.update(f"\0{name}\0{one.st_size}\0{one.st_mtime_ns}".encode())
    return found.hexdigest()
