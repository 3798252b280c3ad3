"""A trial's supervisor as the host sees it: a child with a place of its own, whose last word comes through a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from hpcaccel.errors import SlurmCommandError
from hpcaccel.node.launcher import dying_with_us
from hpcaccel.node.ledger import Ledger
from hpcaccel.node.slots import Slot
from hpcaccel.node.supervisor import WATCHED
from hpcaccel.node.trial import END_TIME, HOSTS_REQUEST
from hpcaccel.records import StopRequest, to_dict
from hpcaccel.rundir import RunDir, read_json, write_json
from hpcaccel.slurm.commands import Slurm

__all__ = ["Trial"]

_LONGEST_WORD = 1 << 15


class Trial:
    """One that is in flight.

    Args:
        end_time: when the allocation ends, where the host keeps that time itself (seconds since the epoch).
        say: tells the host's log.
    """

    def __init__(
        self, run: RunDir, number: int, slot: Slot, *, local: bool, end_time: float | None, say: Callable[[str], None]
    ) -> None:
        self.run = run
        self.number = number
        self.slot = slot
        self._say = say
        self._began = time.monotonic()
        self._told: set[signal.Signals] = set()
        self._asked = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""
        env = {**os.environ, **slot.environment(os.environ, local=local)}
        if end_time is not None:
            env[END_TIME] = repr(end_time)
        self._report, report_to = os.pipe()
        os.set_blocking(self._report, False)
        command = [sys.executable, str(run.node_program), "trial", str(run.path), str(slot), str(report_to)]
        try:
            with run.slurm_log.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[report_to],
                    preexec_fn=dying_with_us(deaf_to=WATCHED),  # until it listens
                    start_new_session=True,
                )
        except OSError as error:
            self._problem = f"cannot start trial {number}: {error}"
        finally:
            os.close(report_to)

    # -- stopping it ----------------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """Hand on a signal of the scheduler's, once."""
        if self._process is not None and number not in self._told:
            self._told.add(number)
            self._process.send_signal(number)

    def ask(self, request: StopRequest) -> None:
        """Hand on what somebody wishes for all trials, once."""
        if self._process is None or self._asked == request.then:
            return
        self._asked = request.then
        try:
            write_json(self.run.control / HOSTS_REQUEST, to_dict(request))
        except OSError as error:
            self._say(f"cannot ask trial {self.number} to stop: {error}; ending it from its last checkpoint")
            self._process.kill()
            return
        self._process.send_signal(signal.SIGCHLD)  # it looks into its folder when it wakes up

    # -- its end --------------------------------------------------------------------------------------------------

    def poll(self) -> dict[str, Any] | None:
        """None while it runs; then how it ended, as the chooser is told."""
        if self._process is not None and self._process.poll() is None:
            return None
        word = self._last_word()
        (self.run.control / HOSTS_REQUEST).unlink(missing_ok=True)
        seconds = round(time.monotonic() - self._began, 3)
        return {"event": "ended", "trial": self.number, **word, "seconds": seconds}

    def _last_word(self) -> dict[str, Any]:
        try:
            data = os.read(self._report, _LONGEST_WORD)
        except BlockingIOError:
            data = b""
        finally:
            os.close(self._report)
        if data.endswith(b"\n"):
            word: dict[str, Any] = json.loads(data)
            return word
        if self._process is None:
            return {"reason": "failed", "decision": "end", "error_class": "refused", "detail": self._problem}
        self._end_ranks()
        code = self._process.returncode
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
