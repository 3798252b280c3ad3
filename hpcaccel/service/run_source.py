"""Source of the runs for the routes: this user's runs on this machine, looked up by id or name, and their overviews."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunNotFound, SpecError, UserError
from hpcaccel.service.behind_ssh.remote_runs import RemoteRuns
from hpcaccel.service.behind_ssh.steered_runs import RemoteRun, RemoteSweep
from hpcaccel.service.run_readings import SWEEP_READINGS, read_run
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.service.shared_values import SharedValues
from hpcaccel.spec import ClusterProfile, load_profile, profile_names
from hpcaccel.submission.runs.find import FoundRun, KnownRuns, find_run
from hpcaccel.submission.runs.overdue_notices import send_overdue_notices
from hpcaccel.submission.runs.run_handle import AnyRun, SweepRun, open_run
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.sweeps.sweep_handle import Sweep
from hpcaccel.view.run_overview import Overview, RunRow, listed, overview

__all__ = ["SORTS", "RunSource"]

SORTS = ("created", "name", "state", "job_id", "attempts", "step", "last_loss", "run_id")
"""Columns by which runs are sorted."""
NOTICE_SECONDS = 600.0
"""Interval of the search for overdue notices of a run that has ended."""
_REMOTE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}:[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


class RunSource:
    """Reads runs for the routes. Viewers share what was read (:class:`SharedValues`)."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self._known_runs = KnownRuns(settings.runs_dir)
        self._known: SharedValues[list[FoundRun]] = SharedValues(seconds=1.0, most=1)
        self._rows: SharedValues[list[RunRow]] = SharedValues(seconds=2.0, most=1)
        self._pages: SharedValues[list[RunRow]] = SharedValues(seconds=1.0, most=50)
        self._overviews: SharedValues[Overview] = SharedValues(seconds=1.0, most=200)
        self._readings: SharedValues[Any] = SharedValues(seconds=1.0, most=150)
        self.remote = RemoteRuns(_profiles_behind_ssh)
        """Runs on the clusters of profiles with ``host``."""
        self._paths: dict[str, Path] = {}
        self._sent: dict[Path, float] = {}
        """When overdue notices of a run were looked for."""

    def changed(self) -> None:
        """Discard cached readings after an action, so that the next request reads them again."""
        for values in (self._known, self._rows, self._pages, self._overviews, self._readings):
            values.forget()
        self.remote.changed()

    def find(self, token: str, *, only_sweeps: bool = False) -> AnyRun:
        """The run with this id, id prefix, name or job id.

        Args:
            only_sweeps: a name means the latest sweep of this name, even if a run has it, too.

        Raises:
            UserError: the run is on a cluster behind SSH.
            RunNotFound: there is no such run; or ``token`` has characters that no id or name has, such as a slash.
        """
        if _REMOTE.fullmatch(token):
            raise UserError(
                f"{token} is on a cluster behind SSH, and this service supports this action only for runs on its own "
                "machine: use the command line, or `hpcaccel serve` on that cluster"
            )
        if not _TOKEN.fullmatch(token) or ".." in token:
            raise RunNotFound(f"{token[:80]!r} is not the name of a run")
        path = self._paths.get(token)
        if path is not None and RunDir(path).record.exists():
            return open_run(path)
        found = find_run(token, runs_dir=self.settings.runs_dir, only_sweeps=only_sweeps)
        if found.run_id == token:  # a name or a prefix may mean another run later
            self._paths[token] = found.path
        return found

    def steered(self, token: str) -> AnyRun | RemoteRun:
        """The run with this name, for an action; a run behind SSH is ``CLUSTER:RUN``.

        Raises:
            RunNotFound: there is no such run.
        """
        return self._there(token) or self.find(token)

    def steered_sweep(self, token: str) -> Sweep | RemoteSweep:
        """The sweep with this name, for an action; a sweep behind SSH is ``CLUSTER:RUN``.

        Raises:
            RunNotFound: there is no such sweep.
            UserError: it is a run, not a sweep; or the cluster cannot be reached.
        """
        if (there := self._there(token)) is not None:
            return self.remote.find_sweep(there)
        return Sweep(self._sweep(token).path)

    def _sweep(self, token: str) -> SweepRun:
        run = self.find(token, only_sweeps=True)
        if not isinstance(run, SweepRun):
            raise UserError(f"{run.run_id} is a run, not a sweep")
        return run

    def known(self) -> list[FoundRun]:
        """All runs and sweeps, oldest first."""
        return self._known.get("", self._known_runs.read)

    def overview(self, token: str) -> Overview:
        """The overview of a run.

        Raises:
            RunNotFound: there is no such run.
        """
        if (there := self._there(token)) is not None:
            return self.remote.overview(there)
        run = self.find(token)
        return self._overviews.get(run.path, lambda: self._overview(run))

    def _overview(self, run: AnyRun) -> Overview:
        status = run.status(patient=True)
        self._send_overdue(run, status)
        return overview(run.dir, status)

    def _send_overdue(self, run: AnyRun, status: RunStatus) -> None:
        last = self._sent.get(run.path)
        if status.ended and (last is None or time.monotonic() > last + NOTICE_SECONDS):
            self._sent[run.path] = time.monotonic()
            send_overdue_notices(run.dir, status)

    def _sweep_view(self, run: AnyRun) -> dict[str, Any]:
        self._send_overdue(run, run.status(patient=True))
        found: dict[str, Any] = read_run(run.dir, "sweep", {"rows": True})
        return found

    def rows(
        self, *, states: Sequence[str] = (), name: str = "", sort: str = "-created", limit: int = 50, offset: int = 0
    ) -> tuple[list[RunRow], int]:
        """The rows of the list that match, from ``offset`` on, and the number of all that match.

        Args:
            states: only runs in one of these states.
            name: only runs whose name or id contains this text.
            sort: one of ``SORTS``; with ``-`` in front, in descending order.
        """
        there = self.remote.rows()
        if not there and not states and sort == "-created":  # the usual first page: the others need not be read
            found = [run for run in reversed(self.known()) if _called(run.name, run.run_id, name)]
            page = found[offset : offset + limit]
            rows = self._pages.get(tuple(run.path for run in page), lambda: _listed(page))
            return rows, len(found)
        every = self._rows.get("", lambda: _listed(self.known()))
        every = [*every, *there]
        chosen = [row for row in every if _called(row.name, row.run_id, name) and (not states or row.state in states)]
        key = sort.lstrip("-")
        chosen.sort(key=lambda row: _order(getattr(row, key)), reverse=sort.startswith("-"))
        return chosen[offset : offset + limit], len(chosen)

    def read(self, token: str, what: str, **options: Any) -> Any:
        """A reading of a run or a sweep, here or behind SSH, as JSON values; see :mod:`hpcaccel.service.run_readings`.

        Raises:
            RunNotFound: there is no such run.
            UserError: a reading of a sweep, but the run is none; or the cluster cannot be reached.
        """
        if (there := self._there(token)) is not None:
            return self.remote.read(there, what, options)
        run = self._sweep(token) if what in SWEEP_READINGS else self.find(token)
        if what == "sweep":
            found = self._readings.get((run.path, what), lambda: self._sweep_view(run))
            return found if options["rows"] else {**found, "rows": []}
        if what == "metrics":
            key = (run.path, what, tuple(options["names"]), options["buckets"])
            return self._readings.get(key, lambda: read_run(run.dir, what, options))
        return read_run(run.dir, what, options)

    def trace_there(self, token: str, name: str) -> Iterator[bytes] | None:
        """A profiler trace of a run behind SSH, in pieces; None for a run on this machine.

        Raises:
            RunNotFound: there is no such run, or it has no such trace.
        """
        there = self._there(token)
        return None if there is None else self.remote.trace(there, name)

    def _there(self, token: str) -> RemoteRun | None:
        """The run on a cluster behind SSH; None for one on this machine."""
        return self.remote.find(token) if _REMOTE.fullmatch(token) else None

    def is_there(self, token: str) -> bool:
        """Whether this is a run on a cluster behind SSH.

        Raises:
            RunNotFound: there is no such cluster.
        """
        return self._there(token) is not None

    def sweeps(self, *, limit: int, offset: int) -> tuple[list[RunRow], int]:
        """The newest sweeps from ``offset`` on, and the number of all sweeps."""
        there = self.remote.sweeps()
        found = [run for run in reversed(self.known()) if run.kind == "sweep"]
        page = found if there else found[offset : offset + limit]  # else all are put in order with those behind SSH
        rows = _listed(page)
        if not there:
            return rows, len(found)
        every = sorted([*rows, *there], key=lambda row: row.created, reverse=True)
        return every[offset : offset + limit], len(every)


def _profiles_behind_ssh() -> Iterator[ClusterProfile]:
    for name in profile_names():
        try:
            profile = load_profile(name)
        except SpecError:
            continue  # the list of clusters shows the problem
        if profile is not None and profile.host is not None:
            yield profile


def _listed(runs: Sequence[FoundRun]) -> list[RunRow]:
    return listed([run.open().dir for run in runs], patient=True)


def _called(name: str, run_id: str, part: str) -> bool:
    return not part or part.lower() in name.lower() or part in run_id


def _order(value: Any) -> tuple[bool, Any]:
    """Missing values come first."""
    return (False, 0) if value is None else (True, value)
