"""Runs and sweeps on clusters behind SSH, which are steered by hpcaccel's own commands there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcaccel.service.behind_ssh.cluster_commands import ClusterCommands
from hpcaccel.submission.runs.control import request_name

__all__ = ["RemoteRun", "RemoteSweep"]


@dataclass(frozen=True)
class RemoteRun:
    """A run on a cluster behind SSH. Errors of all methods are those of :meth:`ClusterCommands.read`."""

    commands: ClusterCommands
    token: str

    @property
    def run_id(self) -> str:
        return f"{self.commands.name}:{self.token}"

    @property
    def job_id(self) -> str:
        """The newest job of the run, from a new query."""
        found = self.commands.read("status", "--json", "--", self.token)
        return str(found["job_id"] if "job_id" in found else "".join(found["job_ids"][-1:]))

    def stop(self, then: str = "pause") -> None:
        then_words = {"pause": [], "requeue": ["--requeue"], "finish": ["--finish"]}[then]
        self._change("stop", *then_words)

    def save(self) -> None:
        self._change("save")

    def profile(self, *, steps: int, ranks: Sequence[int]) -> None:
        """Request traces; the ranks write them into the run directory on the cluster."""
        of_ranks = [f"--rank={rank}" for rank in ranks]
        self._change("profile", "--no-wait", f"--steps={steps}", *of_ranks)

    def cancel(self) -> None:
        self._change("cancel")

    def resume(self) -> None:
        self._change("resume")

    def _change(self, *words: str) -> None:
        self.commands.change(*words, "--", self.token, run=self.token, key=request_name())


@dataclass(frozen=True)
class RemoteSweep:
    """A sweep on a cluster behind SSH. Errors of all methods are those of :meth:`ClusterCommands.read`."""

    commands: ClusterCommands
    sweep_id: str
    """The sweep's run id on the cluster."""

    @property
    def run_id(self) -> str:
        return f"{self.commands.name}:{self.sweep_id}"

    @property
    def job_id(self) -> str:
        """The newest array of the sweep's workers, from a new query."""
        found = self.commands.read("sweep", "status", "--json", "--", self.sweep_id)
        return "".join(found["job_ids"][-1:])

    def stop(self) -> None:
        self._change("sweep", "stop", "--", self.sweep_id)

    def cancel(self) -> None:
        self._change("cancel", "--", self.sweep_id)

    def resume(self, *, changes: Sequence[str] = ()) -> None:
        self._change("sweep", "resume", "--", self.sweep_id, *changes)

    def _change(self, *words: str) -> None:
        self.commands.change(*words, run=self.sweep_id, key=request_name())
