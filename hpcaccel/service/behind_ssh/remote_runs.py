"""The newest runs of all clusters behind SSH: read in the background, named ``CLUSTER:RUN``."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hpcaccel.errors import HpcaccelError, RunNotFound, UserError
from hpcaccel.service.behind_ssh.cluster_commands import ClusterCommands
from hpcaccel.service.json_values import from_json
from hpcaccel.service.shared_values import SharedValues
from hpcaccel.spec import ClusterProfile
from hpcaccel.view.run_overview import Overview, RunRow

__all__ = ["RemoteRun", "RemoteRuns"]

LIST_SECONDS = 30.0
"""Age after which a list is read again, if anyone looks."""
NEWEST = 200
"""Number of runs of each cluster that are listed."""

READING_SECONDS = 3.0
"""Age after which a reading of a run is read again."""


@dataclass
class _Place:
    """A cluster, and what was read from it last."""

    commands: ClusterCommands
    rows: list[RunRow] = field(default_factory=list)
    read: float = float("-inf")
    """When the list was read last, or a try failed, in monotonic seconds."""
    reading: bool = False
    problem: str = ""
    """Why the last try failed; empty if it did not."""


@dataclass(frozen=True)
class RemoteRun:
    """A run on a cluster behind SSH, which can be steered."""

    commands: ClusterCommands
    token: str

    @property
    def run_id(self) -> str:
        return f"{self.commands.name}:{self.token}"

    @property
    def job_id(self) -> str:
        """The newest job of the run, from a new query."""
        return str(self.commands.read("status", "--json", "--", self.token)["job_id"])

    def stop(self, then: str = "pause") -> None:
        then_words = {"pause": [], "requeue": ["--requeue"], "finish": ["--finish"]}[then]
        self.commands.change("stop", *then_words, "--", self.token)

    def save(self) -> None:
        self.commands.change("save", "--", self.token)

    def cancel(self) -> None:
        self.commands.change("cancel", "--", self.token)

    def resume(self) -> None:
        self.commands.change("resume", "--", self.token)


class RemoteRuns:
    """Runs of the clusters in ``profiles``. A cluster that does not respond delays nothing: its last list is shown."""

    def __init__(self, profiles: Iterable[ClusterProfile]) -> None:
        self._places = {profile.name: _Place(ClusterCommands(profile)) for profile in profiles if profile.host}
        self._lock = threading.Lock()
        self._overviews: SharedValues[Overview] = SharedValues(seconds=5.0, most=200)
        self._readings: SharedValues[Any] = SharedValues(seconds=READING_SECONDS, most=300)

    def rows(self) -> list[RunRow]:
        """The rows of all clusters as last read; lists that are too old are read again meanwhile."""
        for place in self._places.values():
            with self._lock:
                due = not place.reading and time.monotonic() - place.read > LIST_SECONDS
                place.reading = place.reading or due
            if due:
                threading.Thread(target=self._read, args=(place,), daemon=True).start()
        return [row for place in self._places.values() for row in place.rows]

    def _read(self, place: _Place) -> None:
        try:
            found = place.commands.read("list", "-n", str(NEWEST), "--json")
            place.rows = [RunRow.of(_here(place.commands.name, one)) for one in found]
            place.problem = ""
        except (HpcaccelError, OSError, ValueError) as error:
            place.problem = str(error)
        finally:
            place.read = time.monotonic()
            place.reading = False

    def problems(self) -> dict[str, str]:
        """Why the last try to read a cluster's list failed, by name of the cluster."""
        return {name: place.problem for name, place in self._places.items() if place.problem}

    def find(self, token: str) -> RemoteRun | None:
        """The run ``CLUSTER:RUN``; None if ``token`` names no cluster.

        Raises:
            RunNotFound: there is no such cluster.
        """
        name, colon, run = token.partition(":")
        if not colon:
            return None
        if name not in self._places or not run or run.startswith("-"):
            raise RunNotFound(
                f"{token[:80]!r} is not a run on a cluster behind SSH ({', '.join(self._places) or 'none'})"
            )
        return RemoteRun(self._places[name].commands, run)

    def overview(self, run: RemoteRun) -> Overview:
        """The overview of a run. Errors are those of :meth:`ClusterCommands.read`."""

        def read() -> Overview:
            return _here(run.commands.name, run.commands.read("status", "--json", "--", run.token))

        return self._overviews.get(run.run_id, read)

    def read(self, run: RemoteRun, what: str, options: dict[str, Any]) -> Any:
        """A reading of a run, see :func:`hpcaccel.service.run_readings.read_run`. Errors are those of
        :meth:`ClusterCommands.ask`."""
        key = (run.run_id, what, json.dumps(options, sort_keys=True))
        return self._readings.get(key, lambda: run.commands.ask(run.token, what, options))

    def changed(self) -> None:
        """Read everything again for the next request."""
        self._overviews.forget()
        self._readings.forget()
        for place in self._places.values():
            place.read = float("-inf")

    def close(self) -> None:
        """Close the connections."""
        for place in self._places.values():
            place.commands.close()


def _here(cluster: str, document: dict[str, Any]) -> Overview:
    """An overview as this machine names it."""
    if "run_id" not in document or "state" not in document:
        raise UserError(f"{cluster} answered something else: {json.dumps(document)[:200]}")
    return from_json(Overview, {**document, "run_id": f"{cluster}:{document['run_id']}", "cluster": cluster})
