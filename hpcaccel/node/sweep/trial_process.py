"""A trial's supervisor as the host sees it: a child with a place of its own, whose last word comes through a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel.core.records import StopRequest, to_dict
from hpcaccel.core.run_dir import RunDir, read_json, write_json
from hpcaccel.errors import SlurmCommandError
from hpcaccel.node.launchers.start_ranks import dying_with_us
from hpcaccel.node.ledger import Ledger
from hpcaccel.node.supervisor import WATCHED
from hpcaccel.node.sweep.slots import Slot
from hpcaccel.node.sweep.trial_supervisor import HOSTS_REQUEST
from hpcaccel.slurm.commands import Slurm

__all__ = ["Spare", "Trial"]

_LONGEST_WORD = 1 << 15
PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class Supervisor:
    """A process that waits to be told which trial it is to supervise."""

    process: subprocess.Popen[bytes]
    report: int
    """Where its last word comes from; a file descriptor."""

    def order(self, value: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value).encode() + b"\n")
        self.process.stdin.close()


class Spare:
    """A supervisor that has started already: the next trial need not wait until a Python has.

    Args:
        program: ``node.pyz``.
    """

    def __init__(self, program: Path) -> None:
        self._program = program
        self._spare: Supervisor | None = None
        self._taken = 0.0

    def keep(self, *, wanted: bool) -> None:
        """Have one ready, but not in the moment in which a trial starts and needs the processor itself."""
        if wanted and self._spare is None and time.monotonic() > self._taken + PAUSE_SECONDS:
            try:
                self._spare = self._start()
            except OSError:
                self._taken = time.monotonic()  # who wants one will be told why there is none

    def take(self) -> Supervisor:
        """Raises OSError where no process can be started."""
        self._taken = time.monotonic()
        spare, self._spare = self._spare, None
        if spare is not None and spare.process.poll() is None:
            return spare
        return self._start()

    def close(self) -> None:
        if self._spare is not None:
            self._spare.process.kill()
            self._spare.process.wait()

    def _start(self) -> Supervisor:
        report, report_to = os.pipe()
        os.set_blocking(report, False)
        try:
            process = subprocess.Popen(
                [sys.executable, str(self._program), "trial", str(report_to)],
                stdin=subprocess.PIPE,
                pass_fds=[report_to],
                preexec_fn=dying_with_us(deaf_to=WATCHED),  # until it listens
                start_new_session=True,
            )
        finally:
            os.close(report_to)
        return Supervisor(process, report)


class Trial:
    """One that is in flight.

    Args:
        spare: supervises it.
        variables: of its environment, besides those of the host.
        say: tells the host's log.
    """

    def __init__(
        self,
        run: RunDir,
        number: int,
        slot: Slot,
        spare: Spare,
        *,
        variables: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.run = run
        self.number = number
        self.slot = slot
        self._say = say
        self._began = time.monotonic()
        self._told: set[signal.Signals] = set()
        self._asked = ""
        self._supervisor: Supervisor | None = None
        self._problem = ""
        try:
            (run.control / HOSTS_REQUEST).unlink(missing_ok=True)  # of a host that was killed
            self._supervisor = spare.take()
            self._supervisor.order({"run": str(run.path), "slot": str(slot), "env": dict(variables)})
        except OSError as error:
            self._problem = f"cannot start trial {number}: {error}"

    # -- stopping it ----------------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """Hand on a signal of the scheduler's, once."""
        if self._supervisor is not None and number not in self._told:
            self._told.add(number)
            self._supervisor.process.send_signal(number)

    def ask(self, request: StopRequest) -> None:
        """Hand on what somebody wishes for all trials, once."""
        if self._supervisor is None or self._asked == request.then:
            return
        self._asked = request.then
        try:
            write_json(self.run.control / HOSTS_REQUEST, to_dict(request))
        except OSError as error:
            self._say(f"cannot ask trial {self.number} to stop: {error}; ending it from its last checkpoint")
            self._supervisor.process.kill()
            return
        self._supervisor.process.send_signal(signal.SIGCHLD)  # it looks into its folder when it wakes up

    # -- its end --------------------------------------------------------------------------------------------------

    def poll(self) -> dict[str, Any] | None:
        """None while it runs; then how it ended, as the chooser is told."""
        if self._supervisor is not None and self._supervisor.process.poll() is None:
            return None
        word = self._last_word()
        (self.run.control / HOSTS_REQUEST).unlink(missing_ok=True)
        seconds = round(time.monotonic() - self._began, 3)
        return {"event": "ended", "trial": self.number, **word, "seconds": seconds}

    def _last_word(self) -> dict[str, Any]:
        if self._supervisor is None:
            return {"reason": "failed", "decision": "end", "error_class": "refused", "detail": self._problem}
        try:
            data = os.read(self._supervisor.report, _LONGEST_WORD)
        except BlockingIOError:
            data = b""
        finally:
            os.close(self._supervisor.report)
        if data.endswith(b"\n"):
            word: dict[str, Any] = json.loads(data)
            return word
        self._end_ranks()
        code = self._supervisor.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        detail = f"the supervisor of trial {self.number} {how} without a last word; see {self.run.slurm_log}"
        if code < 0:
            return {"reason": "lost", "decision": "requeue", "error_class": None, "detail": detail}
        return {"reason": "failed", "decision": "end", "error_class": "supervisor", "detail": detail}

    def _end_ranks(self) -> None:
        """srun ends its step when its supervisor dies; this is for a step that srun has lost."""
        started = Ledger.read(self.run).unfinished()
        step = None if started is None else read_json(self.run.attempt(started.attempt) / "step.json")
        if step is None:
            return
        try:
            Slurm().signal_step(step["job_id"], step["step_id"], "KILL")
        except SlurmCommandError as error:
            self._say(f"ranks of trial {self.number} may still run: {error}")
