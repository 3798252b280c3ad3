"""The worker's side of a running trial, whose supervisor is a child process that reports the end through a pipe."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.parent_death import dying_with_us
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import StopRequest
from hpcaccel.errors import SlurmCommandError
from hpcaccel.node.allocation import Slot
from hpcaccel.node.batch import WATCHED
from hpcaccel.node.ledger import Ledger
from hpcaccel.node.sweep.trial_supervisor import HOSTS_REQUEST
from hpcaccel.slurm.commands import Slurm

__all__ = ["Spare", "Trial"]

log = logging.getLogger(__name__)

_MAX_REPORT_BYTES = 1 << 15
"""Maximum length of a supervisor's report, in bytes."""
END_SECONDS = 3.0
"""How long processes that wait for a trial may take to end warm parents, when the worker leaves."""
PAUSE_SECONDS = 2.0
"""Delay between the start of a trial and the start of the next spare process."""


@dataclass(frozen=True)
class TrialProcess:
    """A supervisor process that waits for its trial on standard input."""

    process: subprocess.Popen[bytes]
    report: int
    """File descriptor from which to read the supervisor's report."""

    def order(self, value: dict[str, Any]) -> None:
        """Send the process its trial: the JSON object that ``wait_for_trials`` reads."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value).encode() + b"\n")
        self.process.stdin.flush()

    def dismiss(self) -> None:
        """Close the standard input of a process that waits for a trial: it and its warm parents then end."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self, *, seconds: float = 0.0) -> None:
        """Wait until the process has ended; kill it after ``seconds``."""
        self.dismiss()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.report)


class Spare:
    """Supervisor processes that wait for a trial: one started in advance, so that the next trial does not wait for
    Python's start, and those of earlier trials that have kept warm parents for the next trial in their slot.

    Args:
        program: ``node.pyz``.
    """

    def __init__(self, program: Path) -> None:
        self._program = program
        self._spare: TrialProcess | None = None
        self._taken = 0.0
        self._kept: dict[str, TrialProcess] = {}
        """By slot."""

    def keep(self, *, wanted: bool) -> None:
        """Start a spare process if there is none, but not within 2 s after a trial's start, which needs the CPU.

        Args:
            wanted: whether further trials may start.
        """
        if wanted and self._spare is None and time.monotonic() > self._taken + PAUSE_SECONDS:
            try:
                self._spare = self._start()
            except OSError:
                self._taken = time.monotonic()  # ``take`` raises the error once a trial needs the process

    def take(self, slot: Slot) -> TrialProcess:
        """Returns the process that the last trial of ``slot`` has left, else the spare process, or a new process.

        Raises:
            OSError: no process can be started.
        """
        self._taken = time.monotonic()
        if (kept := self._kept.pop(str(slot), None)) is not None:
            if kept.process.poll() is None:
                return kept
            kept.close()
        spare, self._spare = self._spare, None
        if spare is not None and spare.process.poll() is None:
            return spare
        return self._start()

    def keep_process(self, slot: Slot, process: TrialProcess) -> None:
        """Keep a process that waits for the next trial of ``slot``."""
        self._kept[str(slot)] = process

    def close(self) -> None:
        end = time.monotonic() + END_SECONDS
        for kept in self._kept.values():
            kept.dismiss()
        for kept in self._kept.values():
            kept.close(seconds=max(0.0, end - time.monotonic()))
        self._kept.clear()
        if self._spare is not None:
            self._spare.process.kill()
            self._spare.process.wait()

    def _start(self) -> TrialProcess:
        report, report_to = os.pipe()
        os.set_blocking(report, False)
        try:
            process = subprocess.Popen(
                [sys.executable, str(self._program), "trial", str(report_to)],
                stdin=subprocess.PIPE,
                pass_fds=[report_to],
                preexec_fn=dying_with_us(blocked=WATCHED),  # these stay pending until the supervisor waits for them
                start_new_session=True,
            )
        finally:
            os.close(report_to)
        return TrialProcess(process, report)


class Trial:
    """A running trial, from the start of its supervisor to the supervisor's report.

    Args:
        number: the trial's number in the sweep.
        slot: the trial's share of the allocation.
        spare: provides the supervisor process.
        variables: environment variables, in addition to the worker's own.
    """

    def __init__(
        self,
        run: RunDir,
        number: int,
        slot: Slot,
        spare: Spare,
        *,
        variables: Mapping[str, str],
    ) -> None:
        self.run = run
        self.number = number
        self.slot = slot
        self._spare = spare
        self._began = time.monotonic()
        self._forwarded: set[signal.Signals] = set()
        self._requested = ""
        self._supervisor: TrialProcess | None = None
        self._problem = ""
        self._report: dict[str, Any] = {}
        try:
            (run.control / HOSTS_REQUEST).unlink(missing_ok=True)  # left by a worker process that was killed
            self._supervisor = spare.take(slot)
            self._supervisor.order({"run": str(run.path), "slot": str(slot), "env": dict(variables)})
        except OSError as error:
            self._problem = f"cannot start trial {number}: {error}"

    # -- stopping -------------------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """Forward a signal from the scheduler to the supervisor, each signal at most once."""
        if self._supervisor is not None and number not in self._forwarded:
            self._forwarded.add(number)
            self._supervisor.process.send_signal(number)

    def request_stop(self, request: StopRequest) -> None:
        """Write a request to stop into the trial's ``control/``, unless the last request had the same ``then``."""
        if self._supervisor is None or self._requested == request.then:
            return
        self._requested = request.then
        try:
            write_json(self.run.control / HOSTS_REQUEST, to_dict(request))
        except OSError as error:
            log.warning(f"cannot write a stop request for trial {self.number}: {error}; killing it")
            self._supervisor.process.kill()
            return
        self._supervisor.process.send_signal(signal.SIGCHLD)  # wakes the supervisor, which then reads the request

    # -- end ------------------------------------------------------------------------------------------------------

    def poll(self) -> dict[str, Any] | None:
        """The trial's end as an event for the tuner; None while the trial runs."""
        running = self._supervisor is not None and self._supervisor.process.poll() is None
        if self._supervisor is not None:
            self._read(self._supervisor)
        if running and not self._report.get("waits"):
            return None
        report = self._end_report()
        (self.run.control / HOSTS_REQUEST).unlink(missing_ok=True)
        seconds = round(time.monotonic() - self._began, 3)
        return {"event": "ended", "trial": self.number, **report, "seconds": seconds}

    def _read(self, supervisor: TrialProcess) -> None:
        """Read the supervisor's report if it has written it."""
        try:
            data = os.read(supervisor.report, _MAX_REPORT_BYTES)
        except BlockingIOError:
            return
        if data.endswith(b"\n"):
            self._report = json.loads(data)

    def _end_report(self) -> dict[str, Any]:
        if self._supervisor is None:
            return {"reason": "failed", "decision": "end", "error_class": "refused", "detail": self._problem}
        if self._report.pop("waits", False):
            self._spare.keep_process(self.slot, self._supervisor)
        else:
            self._supervisor.close()
        if self._report:
            return self._report
        self._end_ranks()
        code = self._supervisor.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        detail = f"the supervisor of trial {self.number} {how} without reporting a result; see {self.run.slurm_log}"
        if code < 0:
            return {"reason": "lost", "decision": "requeue", "error_class": None, "detail": detail}
        return {"reason": "failed", "decision": "end", "error_class": "supervisor", "detail": detail}

    def _end_ranks(self) -> None:
        """Kill the ranks whose supervisor died. srun ends its step then, so this is needed only if srun died too."""
        started = Ledger.of(self.run).unfinished()
        step = None if started is None else read_json(self.run.attempt(started.attempt) / "step.json")
        if step is None:
            return
        try:
            Slurm().signal_step(step["job_id"], step["step_id"], "KILL")
        except SlurmCommandError as error:
            log.warning(f"the ranks of trial {self.number} may still be running: {error}")
