"""The newest runs and sweeps of all clusters behind SSH: read in the background, named ``CLUSTER:RUN``."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hpcaccel.errors import HpcaccelError, RunNotFound, UserError
from hpcaccel.service.behind_ssh.cluster_commands import ClusterCommands
from hpcaccel.service.behind_ssh.steered_runs import RemoteRun, RemoteSweep
from hpcaccel.service.json_values import from_json
from hpcaccel.service.log_parts import MOST_BYTES
from hpcaccel.service.shared_values import SharedValues
from hpcaccel.spec import ClusterProfile
from hpcaccel.submission.remote.protocol import ConnectionLost, Unreachable
from hpcaccel.view.run_overview import Overview, RunRow

__all__ = ["RemoteRuns"]

LIST_SECONDS = 30.0
"""Age after which a list, or the profiles, are read again, if anyone looks."""
NEWEST = 200
"""Number of runs, and of sweeps, of each cluster that are listed."""

READING_SECONDS = 3.0
"""Age after which a reading of a run is read again."""


@dataclass(eq=False)
class _Rows:
    """A list of a cluster's runs, as it was read last."""

    read_again: Callable[[], list[RunRow]]
    rows: list[RunRow] = field(default_factory=list)
    read: float = float("-inf")
    """When the list was read last, or a try failed, in monotonic seconds."""
    reading: bool = False
    problem: str = ""
    """Why the last try failed; empty if it did not."""
    is_lost: bool = False
    """Whether it failed because the cluster cannot be reached."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def refresh(self) -> None:
        """Read the list in the background if it is too old."""
        with self.lock:
            due = not self.reading and time.monotonic() - self.read > LIST_SECONDS
            self.reading = self.reading or due
        if due:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            self.rows = self.read_again()
            self.problem, self.is_lost = "", False
        except (HpcaccelError, OSError, ValueError) as error:
            self.is_lost = isinstance(error, ConnectionLost | Unreachable)
            self.problem = str(error)
        finally:
            self.read = time.monotonic()
            self.reading = False


class _Place:
    """A cluster, and what was read from it last."""

    def __init__(self, profile: ClusterProfile) -> None:
        self.commands = ClusterCommands(profile)
        self.runs = _Rows(self._read_runs)
        self.sweeps = _Rows(self._read_sweeps)

    def _read_runs(self) -> list[RunRow]:
        found = self.commands.read("list", "-n", str(NEWEST), "--json")
        return [RunRow.of(_here(self.commands.name, one)) for one in found]

    def _read_sweeps(self) -> list[RunRow]:
        found = self.commands.ask("", "sweeps", {"limit": NEWEST})
        return [RunRow.of(_here(self.commands.name, one)) for one in found]


class RemoteRuns:
    """Runs of the clusters behind SSH. A cluster that does not respond delays nothing: its last list is shown.

    Args:
        profiles: reads the profiles; those without ``host`` are left out.
    """

    def __init__(self, profiles: Callable[[], Iterable[ClusterProfile]]) -> None:
        self._profiles = profiles
        self._known: dict[str, _Place] = {}
        self._known_since = float("-inf")
        self._lock = threading.Lock()
        self._overviews: SharedValues[Overview] = SharedValues(seconds=READING_SECONDS, most=200)
        self._readings: SharedValues[Any] = SharedValues(seconds=READING_SECONDS, most=300)

    def _places(self, *, anew: bool = False) -> dict[str, _Place]:
        """The clusters by name. Profiles that were added or changed are read again."""
        with self._lock:
            if anew or time.monotonic() - self._known_since > LIST_SECONDS:
                profiles = {one.name: one for one in self._profiles() if one.host}
                for name, place in list(self._known.items()):
                    if profiles.get(name) != place.commands.profile:
                        self._known.pop(name).commands.close()
                for name in profiles.keys() - self._known.keys():
                    self._known[name] = _Place(profiles[name])
                self._known_since = time.monotonic()
            return dict(self._known)

    def rows(self) -> list[RunRow]:
        """The rows of all clusters as last read; lists that are too old are read again meanwhile."""
        return self._last_read([place.runs for place in self._places().values()])

    def sweeps(self) -> list[RunRow]:
        """The rows of the sweeps of all clusters, as :meth:`rows`."""
        return self._last_read([place.sweeps for place in self._places().values()])

    @staticmethod
    def _last_read(lists: list[_Rows]) -> list[RunRow]:
        for one in lists:
            one.refresh()
        return [row for one in lists for row in one.rows]

    def problems(self) -> dict[str, str]:
        """Why the last try to read a cluster's lists failed, by name of the cluster."""
        found = {name: place.runs.problem or place.sweeps.problem for name, place in self._places().items()}
        return {name: problem for name, problem in found.items() if problem}

    def commands(self, profile: ClusterProfile | None) -> ClusterCommands | None:
        """The commands on the cluster of a profile; None if that is this machine."""
        if profile is None or profile.host is None:
            return None
        place = self._places().get(profile.name)
        if place is None or place.commands.profile != profile:
            place = self._places(anew=True)[profile.name]
        return place.commands

    def find(self, token: str) -> RemoteRun | None:
        """The run ``CLUSTER:RUN``; None if ``token`` names no cluster.

        Raises:
            RunNotFound: there is no such cluster.
        """
        name, colon, run = token.partition(":")
        if not colon:
            return None
        places = self._places()
        if name not in places or not run or run.startswith("-"):
            known = ", ".join(places) or "none"
            raise RunNotFound(f"{token[:80]!r} is not a run on a cluster behind SSH (clusters: {known})")
        return RemoteRun(places[name].commands, run)

    def find_sweep(self, run: RemoteRun) -> RemoteSweep:
        """The sweep with the name of ``run``.

        Raises:
            UserError: it is a run, not a sweep; and the errors of :meth:`ClusterCommands.ask`.
        """
        found = run.commands.ask(run.token, "sweep", {"rows": False})
        return RemoteSweep(run.commands, str(found["run_id"]))

    def overview(self, run: RemoteRun) -> Overview:
        """The overview of a run or a sweep. Errors are those of :meth:`ClusterCommands.ask`."""
        name = run.commands.name

        def read() -> Overview:
            return _here(name, run.commands.ask(run.token, "overview", {}))

        with self._if_not_lost(run):
            return self._overviews.get(run.run_id, read)

    def read(self, run: RemoteRun, what: str, options: dict[str, Any]) -> Any:
        """A reading of a run, see :func:`hpcaccel.service.run_readings.read_run`. Errors are those of
        :meth:`ClusterCommands.ask`."""

        def read() -> Any:
            found = run.commands.ask(run.token, what, options)
            if what == "sweep":
                found["run_id"] = f"{run.commands.name}:{found['run_id']}"
            return found

        key = (run.run_id, what, json.dumps(options, sort_keys=True))
        with self._if_not_lost(run):
            return self._readings.get(key, read)

    def trace(self, run: RemoteRun, name: str) -> Iterator[bytes]:
        """A profiler trace in pieces, which are not kept. The first is read now. Errors are those of :meth:`read`."""

        def piece(offset: int) -> tuple[bytes, int]:
            options = {"name": name, "offset": offset, "limit": MOST_BYTES}
            found = run.commands.ask(run.token, "trace-part", options)
            return base64.b64decode(found["base64"]), int(found["size"])

        first, size = piece(0)

        def pieces() -> Iterator[bytes]:
            data, offset = first, 0
            while data:
                yield data
                offset += len(data)
                data = piece(offset)[0] if offset < size else b""

        return pieces()

    @contextmanager
    def _if_not_lost(self, run: RemoteRun) -> Iterator[None]:
        """Raise the cluster's problem if it could not be reached: nobody waits for the next try, in the background."""
        place = self._places().get(run.commands.name)
        if place is not None and place.runs.is_lost:
            place.runs.refresh()
            raise Unreachable(place.runs.problem)
        try:
            yield
        except (ConnectionLost, Unreachable):
            if place is not None:
                place.runs.read = float("-inf")
                place.runs.refresh()  # sets is_lost if it fails, too
            raise

    def changed(self) -> None:
        """Read everything again for the next request."""
        self._overviews.forget()
        self._readings.forget()
        for place in self._places().values():
            place.runs.read = place.sweeps.read = float("-inf")

    def close(self) -> None:
        """Close the connections."""
        for place in self._known.values():
            place.commands.close()


def _here(cluster: str, document: dict[str, Any]) -> Overview:
    """An overview as this machine names it."""
    if "run_id" not in document or "state" not in document:
        raise UserError(f"{cluster} sent an unexpected response: {json.dumps(document)[:200]}")
    return from_json(Overview, _named(cluster, document))


def _named(cluster: str, document: dict[str, Any]) -> dict[str, Any]:
    tasks = [_named(cluster, one) for one in document.get("tasks", [])]
    return {**document, "run_id": f"{cluster}:{document['run_id']}", "cluster": cluster, "tasks": tasks}
