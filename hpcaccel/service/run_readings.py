"""Readings: what the routes show of a run or a sweep, as plain JSON values, without FastAPI.

The routes call them for runs on this machine, and ``hpcaccel answer`` on a login node for a service elsewhere.
"""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field, InstanceOf, ValidationError, validate_call

from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import RunNotFound, UserError
from hpcaccel.service.log_parts import MOST_BYTES, log_files, log_path, read_part
from hpcaccel.submission.runs.find import known_runs
from hpcaccel.submission.runs.status import status
from hpcaccel.submission.submit.comparison import changes_since_previous
from hpcaccel.view.change_lines import change_lines
from hpcaccel.view.merged_log import first_traceback, merged_log
from hpcaccel.view.metric_buckets import metric_names, metrics_buckets
from hpcaccel.view.profile_traces import profiles, trace_path
from hpcaccel.view.run_overview import listed, overview
from hpcaccel.view.sweep_view import sweep_view

__all__ = ["MOST_BUCKETS", "RUN_READINGS", "SWEEP_READINGS", "read_run", "read_sweeps"]

MOST_BUCKETS = 5000

Run = InstanceOf[RunDir]
_OFFSET_LIMIT = 1 << 53


def _overview(run: Run) -> dict[str, Any]:
    return overview(run, status(run, patient=True)).to_json()


def _script(run: Run) -> str:
    return _text(run, "script")


def _spec(run: Run) -> str:
    return _text(run, "spec_yaml")


def _text(run: RunDir, name: str) -> str:
    """A text file of a run, or of the first task of an array."""
    for place in (run, run.task(0)):
        path = getattr(place, name)
        if path.is_file():
            return str(path.read_text(encoding="utf-8", errors="replace"))
    raise RunNotFound(f"run {run.run_id} has no {getattr(run, name).name}")


def _ledger(run: Run) -> list[dict[str, Any]]:
    return [line for line, _ in read_lines(run.ledger)]


def _checkpoints(run: Run) -> list[dict[str, Any]]:
    from hpcaccel.view.checkpoint_tables import list_checkpoints, list_watched

    return [row.to_json() for row in [*list_checkpoints(run.checkpoints), *list_watched(run)]]


def _profiles(run: Run) -> list[dict[str, Any]]:
    return [asdict(one) for one in profiles(run)]


def _trace_part(
    run: Run,
    name: Annotated[str, Field(max_length=400)],
    offset: Annotated[int, Field(ge=0, le=_OFFSET_LIMIT)],
    limit: Annotated[int, Field(ge=1, le=MOST_BYTES)],
) -> dict[str, Any]:
    path = trace_path(run, name)
    if path is None:
        raise RunNotFound(f"run {run.run_id} has no trace {name[:80]!r}")
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(limit)
    return {"base64": base64.b64encode(data).decode(), "size": path.stat().st_size}


def _metric_names(run: Run) -> list[str]:
    return metric_names(run)


def _metrics(
    run: Run,
    names: Annotated[list[str], Field(max_length=100)],
    buckets: Annotated[int, Field(ge=1, le=MOST_BUCKETS)],
) -> dict[str, list[dict[str, Any]]]:
    found = metrics_buckets(run, names, buckets)
    return {name: [vars(bucket) for bucket in curve] for name, curve in found.items()}


def _merged_log(
    run: Run,
    attempt: Annotated[int | None, Field(ge=1, le=1_000_000)],
    limit: Annotated[int, Field(ge=1, le=20_000)],
) -> list[dict[str, Any]]:
    return [vars(line) for line in merged_log(run, attempt, limit=limit)]


def _traceback(run: Run) -> dict[str, Any]:
    found = first_traceback(run)
    rank, text = (None, None) if found is None else found
    return {"rank": rank, "text": text}


def _diff(run: Run) -> str:
    found = changes_since_previous(run)
    return "" if found is None else "".join(f"{line}\n" for line in change_lines(found))


def _logs(run: Run) -> list[dict[str, Any]]:
    return [{"name": name, "bytes": path.stat().st_size} for name, path in log_files(run).items()]


def _log(
    run: Run,
    name: str,
    offset: Annotated[int, Field(ge=-_OFFSET_LIMIT, le=_OFFSET_LIMIT)],
    limit: Annotated[int, Field(ge=1, le=MOST_BYTES)],
) -> dict[str, Any]:
    return asdict(read_part(log_path(run, name), name, offset, limit))


def _sweep(run: Run, rows: bool) -> dict[str, Any]:
    found = sweep_view(SweepDir(run.path))
    return (found if rows else replace(found, rows=[])).to_json()


def _trials(run: Run) -> list[dict[str, Any]]:
    from hpcaccel.sweeps.results import to_json
    from hpcaccel.sweeps.sweep_handle import Sweep

    found: list[dict[str, Any]] = json.loads(to_json(Sweep(run.path).table()))
    return found


def _best(
    run: Run,
    trial: Annotated[int | None, Field(ge=0, le=10_000_000)],
    metric: Annotated[str | None, Field(max_length=200)],
) -> str:
    from hpcaccel.sweeps.sweep_handle import Sweep

    return Sweep(run.path).best(trial=trial, metric=metric).to_yaml()


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    return validate_call(config=ConfigDict(strict=True))(function)


RUN_READINGS: Mapping[str, Callable[..., Any]] = {
    "overview": _checked(_overview),
    "script": _checked(_script),
    "spec": _checked(_spec),
    "ledger": _checked(_ledger),
    "checkpoints": _checked(_checkpoints),
    "profiles": _checked(_profiles),
    "trace-part": _checked(_trace_part),
    "metric-names": _checked(_metric_names),
    "metrics": _checked(_metrics),
    "merged-log": _checked(_merged_log),
    "traceback": _checked(_traceback),
    "diff": _checked(_diff),
    "logs": _checked(_logs),
    "log": _checked(_log),
}
"""Readings of a run by name. Their options are checked."""
SWEEP_READINGS: Mapping[str, Callable[..., Any]] = {
    "sweep": _checked(_sweep),
    "trials": _checked(_trials),
    "best": _checked(_best),
}
"""Readings of a sweep."""


MOST_SWEEPS = 1000


def read_sweeps(limit: int) -> list[dict[str, Any]]:
    """The rows of this user's newest sweeps, newest first, as JSON values.

    Raises:
        UserError: ``limit`` is not a number from 1 to ``MOST_SWEEPS``.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_SWEEPS:
        raise UserError(f"limit {limit!r} is not a number from 1 to {MOST_SWEEPS}")
    found = [run for run in reversed(known_runs()) if run.kind == "sweep"][:limit]
    return [row.to_json() for row in listed([run.open().dir for run in found], patient=True)]


def read_run(run: RunDir, what: str, options: Mapping[str, Any]) -> Any:
    """A reading of a run or a sweep, as JSON values.

    Raises:
        UserError: there is no such reading, or an option is not valid.
        RunNotFound: the run has no such file.
    """
    function = RUN_READINGS.get(what) or SWEEP_READINGS.get(what)
    if function is None:
        raise UserError(f"{what[:80]!r} is not a reading of a run")
    # Not left to validate_call: that of pydantic 2.13.0 raises TypeError for an option of the name self.
    if unknown := sorted(options.keys() - inspect.signature(function).parameters.keys()):
        raise UserError(f"{what}: " + "; ".join(f"{name}: Unexpected keyword argument" for name in unknown))
    try:
        return function(run, **options)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise UserError(f"{what}: {wrong}") from None
