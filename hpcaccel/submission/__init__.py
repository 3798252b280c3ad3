"""Submission of a spec as a job, and handles to submitted runs: status, result, stop, resume.

The folders, in import order: ``code`` (copies of the code), ``entrypoint`` (the program), ``clusters`` (checks against
a site), ``jobs`` (submitting and recording jobs), ``runs`` (submitted runs), ``submit`` (new runs), ``remote``
(clusters behind SSH).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcaccel.submission.runs.find import all_runs as all_runs
    from hpcaccel.submission.runs.find import find_run as find_run
    from hpcaccel.submission.runs.run_handle import Run as Run
    from hpcaccel.submission.runs.run_handle import RunArray as RunArray
    from hpcaccel.submission.runs.status import RunStatus as RunStatus
    from hpcaccel.submission.runs.status import statuses as statuses

_HOME = {
    "Run": "runs.run_handle",
    "RunArray": "runs.run_handle",
    "RunStatus": "runs.status",
    "all_runs": "runs.find",
    "find_run": "runs.find",
    "statuses": "runs.status",
}

__all__ = ["Run", "RunArray", "RunStatus", "all_runs", "find_run", "statuses"]


def __getattr__(name: str) -> Any:
    # Lazy: a rank that unpickles a call must not import pydantic.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
