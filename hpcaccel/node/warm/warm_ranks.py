"""The supervisor's view of ranks with warm parents: the step whose tasks the parents are, and the ranks of one attempt.

The step lasts for as long as attempts follow each other in it. It ends, with all its processes, after any other end
than a failure that may be followed by a restart, after the loss of a parent, and before ranks start on other nodes.
Then srun, or the local launcher, reports the end as it does without warm parents.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hpcaccel.core.launch_spec import LaunchSpec
from hpcaccel.core.log import log_always
from hpcaccel.core.rank_protocol import EXIT_CONTINUED
from hpcaccel.node.batch import shell_code, srun_words
from hpcaccel.node.warm.warm_channel import WarmConnection, WarmListener

__all__ = ["WarmRanks", "WarmStep"]

log = logging.getLogger(__name__)

READY = "the ranks' warm parents have imported the ranks' modules: a restart in place need not import them"
_CRASHES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
AFTER_FAILURE_SECONDS = 2.0
"""How long the other ranks may run after one has failed: their own errors may show the cause. After one of ``_CRASHES``
they show none, and the other ranks are killed at once."""
AFTER_STOP_SECONDS = 15.0
"""How long the other ranks may run after one has exited with ``EXIT_CONTINUED``."""
AFTER_SUCCESS_SECONDS = 60.0
"""Under Slurm: how long the other ranks may run after one has exited with 0. Corresponds to srun's --wait."""
END_SECONDS = 20.0
"""How long the parents may take to kill their ranks, or to exit, before the step is killed."""
MOST_LINES = 16
"""How many ends of ranks are logged at most."""


class Tasks(Protocol):
    """The processes of the step, which the warm parents are. See ``launchers.RankProcesses``."""

    def poll(self) -> int | None: ...
    def request_stop(self) -> None: ...
    def forget_stop(self) -> None:
        """Send no more signals for a stop that was requested: the ranks have ended, and others may follow."""
        ...

    def kill(self) -> None: ...
    def dump(self) -> None: ...
    def wake(self) -> None: ...


class WarmStep:
    """A step of warm parents.

    Args:
        tasks: the processes of the step.
        folder: the folder of the attempt that began with this step.
        environment: the environment of its first attempt.
        connections: the connections, if the parents have inherited them.
        listener: otherwise, the listener that accepts the parents' connections.
    """

    def __init__(
        self,
        launch: LaunchSpec,
        tasks: Tasks,
        *,
        folder: Path,
        nodes: Sequence[str],
        environment: Mapping[str, str],
        connections: Sequence[WarmConnection] = (),
        listener: WarmListener | None = None,
    ) -> None:
        self.tasks = tasks
        self.folder = folder
        self.run = folder.parent.parent
        """The directory of the run whose ranks were started last."""
        self.nodes = list(nodes)
        self.environment = dict(environment)
        self.connections = {one.rank: one for one in connections}
        self.local = launch.local
        self._listener = listener
        self._size = launch.ranks
        self._told = ""
        """What was logged last about whether the next ranks are forked."""

    @property
    def complete(self) -> bool:
        """Whether all parents have connected."""
        return len(self.connections) == self._size

    @property
    def warm(self) -> bool:
        """Whether all parents have imported their ranks' modules, and will probably fork those of the next attempt."""
        return self.complete and all(one.warm and not one.problem for one in self.connections.values())

    def may_start(self, nodes: Sequence[str]) -> bool:
        """Whether the parents can start ranks on ``nodes``."""
        self.receive()
        return self.complete and not self.broken and self.nodes == list(nodes)

    @property
    def broken(self) -> bool:
        """Whether a parent has gone, or the whole step has ended."""
        return any(one.closed for one in self.connections.values()) or self.tasks.poll() is not None

    def receive(self) -> None:
        """Accept parents and receive their reports, without waiting."""
        if self._listener is not None and not self.complete:
            for connection in self._listener.accepted():
                if 0 <= connection.rank < self._size and connection.rank not in self.connections:
                    self.connections[connection.rank] = connection
                else:
                    connection.close()
            if self.complete:
                self._listener.close()
                self._listener = None
        for connection in self.connections.values():
            connection.receive()
        problem = next((one.problem for one in self.connections.values() if one.problem), "")
        state = f"restarts in place start new processes: {problem}" if problem else READY if self.warm else self._told
        if state != self._told:
            self._told = state
            log.info(state)

    def send(self, order: Mapping[str, Any]) -> None:
        for connection in self.connections.values():
            connection.send(order)

    def start(self, attempt: int, orders: Mapping[int, Mapping[str, Any]]) -> None:
        """Start the ranks of the next attempt.

        Args:
            orders: by rank; see ``warm_channel``.
        """
        for rank, order in orders.items():
            self.connections[rank].start(attempt, order)

    def end(self) -> None:
        """End the step. Waits until its processes have ended."""
        self.send({"do": "end"})
        kill_at = time.monotonic() + END_SECONDS
        while self.tasks.poll() is None:
            if time.monotonic() > kill_at:
                self.tasks.kill()
                kill_at = time.monotonic() + END_SECONDS
            signal.sigtimedwait({signal.SIGCHLD}, 0.2)
        self.close()

    def close(self) -> None:
        """Close all connections, and kill what ranks of a lost local parent have left. The parent has killed what is
        left of a rank whose end it has reported, and the number of its group may be that of others by now."""
        for connection in self.connections.values():
            connection.close()
            if self.local and connection.pid is not None and connection.code is None:
                try:
                    os.killpg(connection.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
        if self._listener is not None:
            self._listener.close()


class WarmRanks:
    """The ranks of one attempt in a ``WarmStep``. Has the interface of ``RankProcesses``.

    Args:
        keep: whether the step may outlive these ranks for a restart.
        always: whether it may outlive them however they end.
        stop_signal: the signal that requests a stop.
    """

    def __init__(self, step: WarmStep, *, keep: bool, always: bool = False, stop_signal: signal.Signals) -> None:
        self.step = step
        self.kept = False
        """Whether the ranks have ended and the step waits for the next attempt."""
        self._keep, self._always = keep, always
        self._stop_signal = stop_signal
        self._ended: set[int] = set()
        self._code = 0
        """Exit code of the first rank that failed."""
        self._kill_at: float | None = None
        """When the ranks that are left are killed; after that, when they must have ended."""
        self._kills = 0
        self._ending = False
        self._lost_at: float | None = None
        """When a parent was found to have gone (monotonic clock)."""

    def poll(self) -> int | None:
        step = self.step
        if self.kept:
            return self._code
        step.receive()
        self._note_ends()
        all_ended = step.complete and len(self._ended) == len(step.connections)
        if (code := step.tasks.poll()) is not None:
            step.close()
            return self._code if all_ended else code
        if not self._ending and all_ended and self._may_keep():
            self.kept = True
            step.tasks.forget_stop()
            return self._code
        if not self._ending and (all_ended or self._must_end()):
            self._ending = True
            step.send({"do": "end"})
            self._kill_at = None  # srun ends what is left, and waits for a node that Slurm has not yet given up
        elif not step.complete:
            for rank in self._ended:  # so that srun reports the end, as without warm parents
                step.connections[rank].send({"do": "end"})
        elif self._kill_at is not None and time.monotonic() > self._kill_at:
            if self._kills:
                self._lost_at = 0.0  # a parent does not answer: its node may be lost
            else:
                self.kill()
        return None

    def _must_end(self) -> bool:
        """Whether a parent has gone, and the other ranks have had time to end by themselves."""
        if self._lost_at is None and self.step.broken:
            self._lost_at = time.monotonic()
        return self._lost_at is not None and time.monotonic() >= self._lost_at + AFTER_FAILURE_SECONDS

    def _note_ends(self) -> None:
        found = [one for rank, one in self.step.connections.items() if one.code is not None and rank not in self._ended]
        # Of ranks whose ends are seen together, one that crashed has not ended because of the others.
        for one in sorted(found, key=lambda one: (-(one.code or 0) not in _CRASHES, one.rank)):
            assert one.code is not None
            self._ended.add(one.rank)
            now = time.monotonic()
            if self._ending:
                continue  # ended by this supervisor
            if one.code == 0:
                if not self.step.local and self._kill_at is None:
                    self._kill_at = now + AFTER_SUCCESS_SECONDS
                continue
            if not self._kills and len(self._ended) <= MOST_LINES:
                where = "" if self.step.local else f" on {one.host}"
                log_always(log, f"rank {one.rank}{where}: {srun_words(one.code)}")
            if not self._code:
                self._code = shell_code(one.code)
                self._kill_at = now + _patience_seconds(one.code)

    def _may_keep(self) -> bool:
        """Whether the step may outlive its ranks. If memory was short on a node, Slurm's records of the step's end are
        needed."""
        found = self.step.connections.values()
        keep = self._always or (self._keep and self._code != 0)
        return keep and not any(one.memory or one.bound for one in found)

    def request_stop(self) -> None:
        self._keep = False
        self._signal(self._stop_signal, by_slurm=self.step.tasks.request_stop)

    def kill(self) -> None:
        """Kill every rank. If some are left at the next call, kill the step."""
        self._kills += 1
        self._kill_at = time.monotonic() + END_SECONDS
        if self._kills > 1 or self._ending or not self.step.complete:
            self.step.tasks.kill()
            return
        for rank, connection in self.step.connections.items():
            if rank not in self._ended:
                connection.send({"do": "kill"})

    def dump(self) -> None:
        self._signal(signal.SIGURG, by_slurm=self.step.tasks.dump)

    def wake(self) -> None:
        self._signal(signal.SIGCONT, by_slurm=self.step.tasks.wake)

    def _signal(self, number: signal.Signals, *, by_slurm: Callable[[], None]) -> None:
        """Signal every rank. Slurm signals their parents too, which pass a signal on only if they have no rank."""
        if self.step.local:
            self.step.send({"do": "signal", "number": int(number)})
        else:
            by_slurm()


def _patience_seconds(code: int) -> float:
    if code == EXIT_CONTINUED:
        return AFTER_STOP_SECONDS
    return 0.0 if -code in _CRASHES else AFTER_FAILURE_SECONDS
