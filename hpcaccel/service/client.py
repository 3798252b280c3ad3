"""``hpcaccel.Client``: the verbs of the service's REST for Python programs, over a port or a Unix socket."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from hpcaccel.service.client_answers import LogText, RunPage, Submission
from hpcaccel.service.client_connection import TIMEOUT_SECONDS, ServiceConnection, ServiceError, ServiceSpecError
from hpcaccel.service.json_values import from_json

if TYPE_CHECKING:
    from hpcaccel.view.merged_log import LogLine
    from hpcaccel.view.metric_buckets import Bucket
    from hpcaccel.view.run_overview import Overview
    from hpcaccel.view.sweep_view import SweepView

__all__ = ["Client", "LogText", "RunPage", "ServiceError", "ServiceSpecError", "Submission"]


class Client:
    """A connection to ``hpcaccel serve``. Not for several threads at once: each needs its own.

    Args:
        url: the printed link (its token is used), or the address without a token. For a Unix socket: the base path
            only, or nothing.
        token: the token; default: that of the link, else ``HPCACCEL_SERVICE_TOKEN``.
        socket: path of the service's Unix socket, in place of a port.
        timeout_seconds: longest wait for an answer.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1",
        token: str | None = None,
        socket: str | os.PathLike[str] | None = None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._connection = ServiceConnection(url, token, socket, timeout_seconds=timeout_seconds)

    def __repr__(self) -> str:
        return f"Client({str(self._connection)!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._connection.close()

    # -- runs -----------------------------------------------------------------------------------------------------

    def runs(
        self,
        *,
        state: str | Sequence[str] = (),
        name: str = "",
        sort: str = "-created",
        limit: int = 50,
        offset: int = 0,
    ) -> RunPage:
        """A page of the list of runs, newest first.

        Args:
            state: only runs in this state, or in one of several.
            name: only runs whose name or id contains this text.
            sort: a column, with ``-`` in front for descending order: created, name, state, job_id, attempts, step,
                last_loss, run_id.
        """
        states = state if isinstance(state, str) else ",".join(state)
        query = {"state": states, "name": name, "sort": sort, "limit": limit, "offset": offset}
        answer = self._get("runs", query)
        return RunPage(runs=[_overview(one) for one in answer["runs"]], total=answer["total"])

    def run(self, run_id: str) -> Overview:
        """The overview of a run."""
        return _overview(self._get(f"runs/{_part(run_id)}"))

    def script(self, run_id: str) -> str:
        """The batch script."""
        return self._text(f"runs/{_part(run_id)}/script")

    def spec(self, run_id: str) -> str:
        """The spec as YAML."""
        return self._text(f"runs/{_part(run_id)}/spec")

    def ledger(self, run_id: str) -> list[dict[str, Any]]:
        """The lines of the ledger."""
        return list(self._get(f"runs/{_part(run_id)}/ledger"))

    def profiles(self, run_id: str) -> list[dict[str, Any]]:
        """The traces of torch's profiler, oldest first; ``name`` is empty where there is none yet."""
        return list(self._get(f"runs/{_part(run_id)}/profiles"))

    def trace(self, run_id: str, name: str) -> bytes:
        """A trace as a file for ui.perfetto.dev: JSON, compressed with gzip. ``name`` is one of ``profiles``."""
        return self._connection.request("GET", f"runs/{_part(run_id)}/profiles/{quote(name)}")

    def checkpoints(self, run_id: str) -> list[dict[str, Any]]:
        """The checkpoints, oldest first."""
        return list(self._get(f"runs/{_part(run_id)}/checkpoints"))

    def metric_names(self, run_id: str) -> list[str]:
        """The names of all metrics that the run has logged."""
        return list(self._get(f"runs/{_part(run_id)}/metric-names"))

    def metrics(self, run_id: str, names: Sequence[str] = ("loss",), buckets: int = 500) -> dict[str, list[Bucket]]:
        """Curves, one line across all attempts: minimum, maximum and mean in each of at most ``buckets`` buckets."""
        from hpcaccel.view.metric_buckets import Bucket

        found = self._get(f"runs/{_part(run_id)}/metrics", {"names": list(names), "buckets": buckets})
        return {name: [from_json(Bucket, one) for one in curve] for name, curve in found.items()}

    def merged_log(self, run_id: str, *, attempt: int | None = None, limit: int = 1000) -> list[LogLine]:
        """The newest lines of the ranks and the supervisor of an attempt, by default of the newest one."""
        from hpcaccel.view.merged_log import LogLine

        found = self._get(f"runs/{_part(run_id)}/merged-log", {"attempt": attempt, "limit": limit})
        return [from_json(LogLine, one) for one in found]

    def traceback(self, run_id: str) -> tuple[int, str] | None:
        """The rank at fault, or else the lowest rank with a traceback, and the traceback; None if there is none."""
        found = self._get(f"runs/{_part(run_id)}/traceback")
        return None if found["text"] is None else (found["rank"], found["text"])

    def diff(self, run_id: str) -> str:
        """The changes since the previous run of this name, as text; empty for the first one."""
        return self._text(f"runs/{_part(run_id)}/diff")

    def logs(self, run_id: str) -> dict[str, int]:
        """The names of the log files, each with its size in bytes."""
        return {one["name"]: one["bytes"] for one in self._get(f"runs/{_part(run_id)}/logs")}

    def log(self, run_id: str, name: str, offset: int = 0, limit: int = 65536) -> LogText:
        """A range of a log. A negative ``offset`` counts from the end."""
        query = {"offset": offset, "limit": limit}
        return from_json(LogText, self._get(f"runs/{_part(run_id)}/logs/{quote(name)}", query))

    def follow(self, run_id: str, name: str, offset: int = 0) -> Iterator[str]:
        """Yield the text of a log as it grows, until the run has ended. Lost connections are opened again."""
        path = f"runs/{_part(run_id)}/logs/{quote(name)}/stream"
        for event, data in self._connection.events(path, offset=offset):
            if event == "log":
                yield data["text"]

    # -- submitting -----------------------------------------------------------------------------------------------

    def submit(self, spec: str | Mapping[str, Any], **options: Any) -> Submission:
        """Submit a spec.

        Args:
            spec: YAML text, or the values.
            options: ``overrides``, ``cluster``, ``directory``, ``grid``, ``from_run``, ``after``, and
                ``idempotency_key``: 8 to 64 letters, digits, ``-`` and ``_``; the same key submits only once.

        Raises:
            ServiceSpecError: the spec is not valid.
        """
        return from_json(Submission, self._post("runs", _spec_body(spec, options)))

    def check(self, spec: str | Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Check a spec; nothing is submitted. Arguments and errors as in :meth:`submit`."""
        return dict(self._post("check", _spec_body(spec, options)))

    def render(self, spec: str | Mapping[str, Any], **options: Any) -> str:
        """The batch script of a spec. Arguments and errors as in :meth:`submit`."""
        return self._text("render", _spec_body(spec, options))

    def plan(self, spec: str | Mapping[str, Any], **options: Any) -> list[dict[str, Any]]:
        """Expected starts; ``partitions`` and ``nodes`` are compared. Other arguments as in :meth:`submit`."""
        return list(self._post("plan", _spec_body(spec, options)))

    def schema(self, *, sweep: bool = False) -> dict[str, Any]:
        """The JSON Schema of specs."""
        return dict(self._get("schema", {"sweep": "true" if sweep else "false"}))

    def spec_files(self) -> list[str]:
        """Spec files below the directory in which the service was started."""
        return list(self._get("spec-files"))

    def spec_file(self, name: str) -> tuple[str, str]:
        """The YAML text of one of these files, and the directory to which its relative paths refer."""
        found = self._get("spec-file", {"name": name})
        return found["yaml"], found["directory"]

    # -- actions --------------------------------------------------------------------------------------------------

    def stop(
        self, run_id: str, then: Literal["pause", "requeue", "finish"] = "pause", *, idempotency_key: str | None = None
    ) -> None:
        """Save and stop; then stay stopped, return to the queue, or end."""
        self._post(f"runs/{_part(run_id)}/stop", {"then": then}, key=idempotency_key)

    def save(self, run_id: str) -> None:
        """Save a checkpoint now and go on."""
        self._post(f"runs/{_part(run_id)}/save")

    def profile(self, run_id: str, steps: int = 5, *, ranks: Sequence[int] = (0,)) -> None:
        """Record the next steps with torch's profiler, and go on."""
        self._post(f"runs/{_part(run_id)}/profile", {"steps": steps, "ranks": list(ranks)})

    def cancel(self, run_id: str, *, idempotency_key: str | None = None) -> None:
        """Cancel the run now, without a requeue."""
        self._post(f"runs/{_part(run_id)}/cancel", key=idempotency_key)

    def resume(self, run_id: str) -> str:
        """Continue the run in a new job. Returns the job's id."""
        return str(self._post(f"runs/{_part(run_id)}/resume")["job_id"])

    # -- sweeps ---------------------------------------------------------------------------------------------------

    def sweeps(self, *, limit: int = 50, offset: int = 0) -> RunPage:
        """A page of the list of sweeps, newest first."""
        answer = self._get("sweeps", {"limit": limit, "offset": offset})
        return RunPage(runs=[_overview(one) for one in answer["sweeps"]], total=answer["total"])

    def sweep(self, run_id: str, *, rows: bool = True) -> SweepView:
        """State, results and plots of a sweep; ``rows=False`` leaves out the row of each trial."""
        from hpcaccel.view.sweep_view import SweepView

        query = {"rows": "true" if rows else "false"}
        return from_json(SweepView, self._get(f"sweeps/{_part(run_id)}", query))

    def trials(self, run_id: str) -> list[dict[str, Any]]:
        """A row for each trial of a sweep."""
        return list(self._get(f"sweeps/{_part(run_id)}/trials"))

    def best(self, run_id: str, *, trial: int | None = None, metric: str | None = None) -> str:
        """The best trial of a sweep as a spec in YAML."""
        return self._text(f"sweeps/{_part(run_id)}/best", query={"trial": trial, "metric": metric})

    def start_sweep(self, spec: str | Mapping[str, Any], **options: Any) -> Submission:
        """Start a sweep: a spec with a section ``sweep``. Arguments and errors as in :meth:`submit`."""
        return from_json(Submission, self._post("sweeps", _spec_body(spec, options)))

    def stop_sweep(self, run_id: str) -> None:
        """Let the trials save and stop."""
        self._post(f"sweeps/{_part(run_id)}/stop")

    def cancel_sweep(self, run_id: str) -> None:
        """End the workers now."""
        self._post(f"sweeps/{_part(run_id)}/cancel")

    def resume_sweep(self, run_id: str, *, overrides: Sequence[str] = ()) -> None:
        """Continue a sweep with new workers."""
        self._post(f"sweeps/{_part(run_id)}/resume", {"overrides": list(overrides)})

    def clusters(self) -> list[dict[str, Any]]:
        """The clusters of the profiles."""
        return list(self._get("clusters"))

    # -- requests -------------------------------------------------------------------------------------------------

    def _get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        return json.loads(self._connection.request("GET", path, query=query))

    def _post(self, path: str, body: Mapping[str, Any] | None = None, *, key: str | None = None) -> Any:
        return json.loads(self._connection.request("POST", path, body=body, key=key))

    def _text(self, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, Any] | None = None) -> str:
        return self._connection.request("GET" if body is None else "POST", path, body=body, query=query).decode()


def _part(text: str) -> str:
    """One part of a path."""
    return quote(text, safe="")


def _spec_body(spec: str | Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in options.items() if value is not None}
    return {**given, **({"yaml": spec} if isinstance(spec, str) else {"spec": dict(spec)})}


def _overview(value: Any) -> Overview:
    from hpcaccel.view.run_overview import Overview

    return from_json(Overview, value)
