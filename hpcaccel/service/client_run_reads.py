"""The client's methods that read a run: the list, overview, spec, metrics, logs, checkpoints, traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hpcaccel.service.client_answers import LogText, RunPage
from hpcaccel.service.client_requests import ClientRequests, overview_of, path_part
from hpcaccel.service.json_values import from_json

if TYPE_CHECKING:
    from hpcaccel.view.merged_log import LogLine
    from hpcaccel.view.metric_buckets import Bucket
    from hpcaccel.view.run_overview import Overview

__all__ = ["RunReads"]


class RunReads(ClientRequests):
    """Methods that read runs."""

    def runs(
        self,
        *,
        state: str | Sequence[str] = (),
        name: str = "",
        sort: str = "-created",
        limit: int = 50,
        offset: int = 0,
    ) -> RunPage:
        """A page of the list of runs and sweeps, by default newest first.

        Args:
            state: only runs in this state, such as ``running``, or in one of several.
            name: only runs whose name or id contains this text.
            sort: a column, with ``-`` in front for descending order: created, name, state, job_id, attempts, step,
                last_loss, run_id.
            limit: maximum number of rows, 1 to 20,000.
            offset: number of matching rows to skip.

        Returns:
            The rows, and the number of all runs that match.
        """
        states = state if isinstance(state, str) else ",".join(state)
        query = {"state": states, "name": name, "sort": sort, "limit": limit, "offset": offset}
        answer = self._get("runs", query)
        return RunPage(runs=[overview_of(one) for one in answer["runs"]], total=answer["total"])

    def run(self, run_id: str) -> Overview:
        """The overview of a run: state, steps, attempts, usage. Its times are seconds since the epoch."""
        return overview_of(self._get(f"runs/{path_part(run_id)}"))

    def script(self, run_id: str) -> str:
        """The text of the run's batch script."""
        return self._text(f"runs/{path_part(run_id)}/script")

    def spec(self, run_id: str) -> str:
        """The run's spec as YAML text, with all values that were set."""
        return self._text(f"runs/{path_part(run_id)}/spec")

    def ledger(self, run_id: str) -> list[dict[str, Any]]:
        """The run's ledger, oldest line first: ``event`` is ``start`` or ``end`` of an attempt."""
        return list(self._get(f"runs/{path_part(run_id)}/ledger"))

    def profiles(self, run_id: str) -> list[dict[str, Any]]:
        """The traces that :meth:`profile` has requested, oldest first.

        Returns:
            For each trace: ``name``, which is empty if no file was written yet, ``attempt``, ``rank``, ``state``
            (``recording``, ``writing``, ``done`` or ``failed``), ``first_step``, ``last_step``, ``path``, ``bytes``,
            ``time`` (seconds since the epoch) and ``detail``.
        """
        return list(self._get(f"runs/{path_part(run_id)}/profiles"))

    def trace(self, run_id: str, name: str) -> bytes:
        """Download a trace of torch's profiler, to open it in ui.perfetto.dev.

        Args:
            name: the ``name`` of one of :meth:`profiles`, such as ``1/step_1201-rank0.json.gz``.

        Returns:
            The content of the file: Chrome's JSON, compressed with gzip.

        Raises:
            RunNotFound: there is no such run, or it has no such trace.
        """
        return self._connection.request("GET", f"runs/{path_part(run_id)}/profiles/{quote(name)}")

    def checkpoints(self, run_id: str) -> list[dict[str, Any]]:
        """The run's checkpoints, oldest first, then those that its program has written by itself.

        Returns:
            For each checkpoint: ``path``, ``step`` (None if unknown), ``good``, ``problem`` (why it is not good, else
            None), ``pinned``, and the entries of its manifest. Manifests and file sizes are checked; tensors are not
            read.
        """
        return list(self._get(f"runs/{path_part(run_id)}/checkpoints"))

    def metric_names(self, run_id: str) -> list[str]:
        """The names of all metrics with a finite value, in the order in which they were first logged."""
        return list(self._get(f"runs/{path_part(run_id)}/metric-names"))

    def metrics(self, run_id: str, names: Sequence[str] = ("loss",), buckets: int = 500) -> dict[str, list[Bucket]]:
        """Curves of metrics across all attempts. For a step that was repeated, the newest attempt counts.

        Args:
            names: metrics, at most 100.
            buckets: number of equal ranges of steps, 1 to 5,000.

        Returns:
            For each name its buckets in the order of the steps, with minimum, maximum and mean; an empty list if the
            metric was not logged.

        Example::

            for bucket in client.metrics("gpt", ["loss"], buckets=100)["loss"]:
                print(bucket.step_first, bucket.mean)
        """
        from hpcaccel.view.metric_buckets import Bucket

        found = self._get(f"runs/{path_part(run_id)}/metrics", {"names": list(names), "buckets": buckets})
        return {name: [from_json(Bucket, one) for one in curve] for name, curve in found.items()}

    def merged_log(self, run_id: str, *, attempt: int | None = None, limit: int = 1000) -> list[LogLine]:
        """The newest lines of the logs of an attempt's ranks and supervisor, in the order of their times if they
        begin with any.

        Args:
            attempt: number of the attempt, from 1; default: the newest.
            limit: maximum number of lines, 1 to 20,000.
        """
        from hpcaccel.view.merged_log import LogLine

        found = self._get(f"runs/{path_part(run_id)}/merged-log", {"attempt": attempt, "limit": limit})
        return [from_json(LogLine, one) for one in found]

    def traceback(self, run_id: str) -> tuple[int, str] | None:
        """Why the newest attempt that has ended failed: the rank at fault, or else the lowest rank with a traceback.

        Returns:
            The rank and its traceback, or the end of its log, or for a hang its stacks; None if the attempt did not
            fail, or no such rank is found.
        """
        found = self._get(f"runs/{path_part(run_id)}/traceback")
        return None if found["text"] is None else (found["rank"], found["text"])

    def diff(self, run_id: str) -> str:
        """The changes of settings and code since the previous run of this name, as text; empty for the first run."""
        return self._text(f"runs/{path_part(run_id)}/diff")

    def logs(self, run_id: str) -> dict[str, int]:
        """The names of the log files, such as ``1/0.log`` for rank 0 of attempt 1, each with its size in bytes."""
        return {one["name"]: one["bytes"] for one in self._get(f"runs/{path_part(run_id)}/logs")}

    def log(self, run_id: str, name: str, offset: int = 0, limit: int = 65536) -> LogText:
        """A range of a log file.

        Args:
            name: a name of :meth:`logs`.
            offset: first byte; a negative offset counts from the end of the file.
            limit: maximum number of bytes, 1 to 524,288.

        Returns:
            The text, in which bytes that are not UTF-8 are replaced, and the offset of the next range.

        Raises:
            RunNotFound: there is no such run, or it has no such log.
        """
        query = {"offset": offset, "limit": limit}
        return from_json(LogText, self._get(f"runs/{path_part(run_id)}/logs/{quote(name)}", query))

    def follow(self, run_id: str, name: str, offset: int = 0) -> Iterator[str]:
        """Yield the text of a log as it grows, until the run has ended or is paused.

        The log of a rank that an active run has not started yet may be followed, too. A lost connection is opened
        again, and the text continues where it was lost.

        Args:
            name: a name of :meth:`logs`.
            offset: first byte; a negative offset counts from the end of the file.

        Raises:
            RunNotFound: there is no such run, or it has no such log.
            ServiceError: the service could not be reached again in 30 attempts, two seconds apart.

        Example::

            for text in client.follow("gpt", "1/0.log"):
                print(text, end="")
        """
        path = f"runs/{path_part(run_id)}/logs/{quote(name)}/stream"
        for event, data in self._connection.events(path, offset=offset):
            if event == "log":
                yield data["text"]
