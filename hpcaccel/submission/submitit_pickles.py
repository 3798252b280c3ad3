"""The pickles that submitit opens: what a rank of a callable runs, named by its job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import RunDir, read_json
from hpcaccel.errors import RunDirectoryError
from hpcaccel.submission.calls import FUNCTION_FILE, FunctionCall, ProgramStub

__all__ = ["call_of", "launch_of", "leave_pickles", "write_call"]


def launch_of(run: RunDir) -> dict[str, Any]:
    """The launch part of its ``spec.json``; raises RunDirectoryError where there is none."""
    document = read_json(run.spec)
    if document is None:
        raise RunDirectoryError(f"{run.spec} is missing: nothing can be submitted from {run.path}")
    launch: dict[str, Any] = document["launch"]
    return launch


def call_of(run: RunDir) -> FunctionCall | ProgramStub:
    if launch_of(run)["kind"] != "callable":
        return ProgramStub(str(run.path))
    code = run.code if run.code.exists() else None
    return FunctionCall(str(run.submitit / FUNCTION_FILE), None if code is None else str(code))


def write_call(run: RunDir) -> None:
    """Write what the ranks of a callable run, for a supervisor whose submit is killed before it knows the job."""
    if isinstance(call := call_of(run), FunctionCall):
        _write(call, run.call)


def leave_pickles(run: RunDir, job_id: str, indices: Sequence[int] | None) -> None:
    """Write the pickles of a job whose submit was killed before it could."""
    for left in run.path.glob(".*.pkl"):
        left.unlink(missing_ok=True)
    for index in [None] if indices is None else indices:
        task, own = (run, job_id) if index is None else (run.task(index), f"{job_id}_{index}")
        path = task.submitit / f"{own}_submitted.pkl"
        if not path.exists():
            _write(call_of(task), path)


def _write(call: FunctionCall | ProgramStub, path: Path) -> None:
    from submitit.core.utils import DelayedSubmission

    temporary = path.with_suffix(".pkl.tmp")
    DelayedSubmission(call).dump(temporary)
    temporary.rename(path)
