"""From a spec to a job, and the hold on a run afterwards: its state, its result, stopping it, going on with it.

``submit`` itself is in the module of that name, and is ``hpcaccel.submit`` for users.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcaccel.submission.find import all_runs as all_runs
    from hpcaccel.submission.find import find_run as find_run
    from hpcaccel.submission.run_handle import Run as Run
    from hpcaccel.submission.run_handle import RunArray as RunArray
    from hpcaccel.submission.status import RunStatus as RunStatus
    from hpcaccel.submission.status import statuses as statuses

_HOME = {
    "Run": "run_handle",
    "RunArray": "run_handle",
    "RunStatus": "status",
    "all_runs": "find",
    "find_run": "find",
    "statuses": "status",
}

__all__ = ["Run", "RunArray", "RunStatus", "all_runs", "find_run", "statuses"]


def __getattr__(name: str) -> Any:
    # Lazy, so that a rank which unpickles a call of ours does not load pydantic along with it.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
