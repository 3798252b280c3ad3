"""Program that starts one machine's ranks with torchrun's agent. ``hpcaccel launch`` becomes it; nothing imports it.

Unlike torchrun, it forwards SIGUSR1 and SIGUSR2, exits with the code of the first failed rank, restarts no ranks that
have stopped on request, and leaves no rank behind when it is killed.

Usage: ``python -m hpcaccel.launch.elastic_agent [--quiet] N ARGUMENTS``. The first N arguments are torchrun's, with the
script at their end. The script's own follow, which torchrun's parser would change: it removes a ``--``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

from hpcaccel.core.rank_protocol import EXIT_CONTINUED

SHUTDOWN_SECONDS = 300
"""How long ranks may take to end after a signal: long enough to save a checkpoint. torchrun's default is 30."""


MARK = "HPCACCEL_LAUNCH_MARK"
"""Variable by which the guard recognises the ranks and the processes that they have started."""


class AgentRanks:
    """The rank processes since the last restart, by local rank. Forwards SIGUSR1 and SIGUSR2 to them."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[Any]] = {}
        self.asked_to_stop = False
        """Whether ranks have received SIGUSR2, which asks a training to stop."""
        mark = f"{MARK}={uuid.uuid4().hex}"
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("orphan_guard.py")), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        name, _, value = mark.partition("=")
        os.environ[name] = value  # inherited by the ranks and their children, not by the guard
        for one in (signal.SIGUSR1, signal.SIGUSR2):  # now: they may arrive during the import of torch
            signal.signal(one, self._pass_on)

    def watch(self) -> None:
        """Record every rank that torchrun starts from now on: each process with its own session is a rank."""
        ranks = self

        class Process(subprocess.Popen[Any]):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                if kwargs.get("start_new_session"):
                    ranks.add((kwargs.get("env") or {}).get("LOCAL_RANK", ""), self)

        subprocess.Popen = Process  # type: ignore[misc]

    def add(self, local_rank: str, process: subprocess.Popen[Any]) -> None:
        """Record a rank that has been started, and send the guard the new list of process groups."""
        self._running[local_rank] = process
        self._tell(" ".join(str(one.pid) for one in self._running.values()))

    def ended(self) -> None:
        """Report to the guard that all ranks have ended, so that it kills none."""
        self._tell("done")

    def exit_like(self, received: signal.Signals) -> None:
        """Exit as the ranks did after the signal ``received``.

        Exit with 0 if all succeeded, else with the first positive exit code. If there is none, end by the signal that
        killed the failed rank with the lowest local rank (SIGKILL: exit with 137), or by ``received`` if no rank was
        started.
        """
        codes = [one.returncode for _, one in sorted(self._running.items(), key=lambda item: int(item[0] or 0))]
        bad = [code for code in codes if code]
        if codes and not bad:
            sys.exit(0)
        code = next((code for code in bad if code > 0), bad[0] if bad else -received)
        if code > 0:
            sys.exit(code)
        if code == -signal.SIGKILL:
            sys.exit(128 + signal.SIGKILL)
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        self.asked_to_stop |= signum == signal.SIGUSR2 and bool(self._running)
        for process in self._running.values():
            process.send_signal(signum)

    def _tell(self, line: str) -> None:
        stdin = self._guard.stdin
        assert stdin is not None
        try:
            stdin.write(f"{line}\n".encode())
            stdin.flush()
        except BrokenPipeError:
            print(
                "the guard process has been killed: if this launcher is killed too, its ranks keep running",
                file=sys.stderr,
            )


def restart_only_after_failures(ranks: AgentRanks) -> None:
    """Make torchrun restart no ranks, whatever ``--max-restarts`` is, after SIGUSR2 or if a rank has exited with the
    code of a training that can be resumed: the ranks have stopped, and have not failed."""
    from torch.distributed.launcher import api

    class Agent(api.LocalElasticAgent):  # type: ignore[misc, unused-ignore]
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            stopped = any(failure.exitcode == EXIT_CONTINUED for failure in result.failures.values())
            if ranks.asked_to_stop or stopped:
                self._remaining_restarts = 0
            return result

    api.LocalElasticAgent = Agent  # type: ignore[misc, unused-ignore]


def main() -> None:
    """Run torchrun with this process's arguments, and exit with the first failed rank's exit code."""
    quiet = sys.argv[1] == "--quiet"
    number, *words = sys.argv[1 + quiet :]
    count = int(number)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    ranks = AgentRanks()
    ranks.watch()
    try:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    except ImportError as error:
        sys.exit(f"error: hpcaccel launch needs torch in {sys.executable} to start several ranks: {error}")
    restart_only_after_failures(ranks)
    try:
        arguments = run.get_args_parser().parse_args(words[:count])
        arguments.training_script_args = words[count:]
        record(run.run)(arguments)
        ranks.ended()
    except ChildFailedError as error:
        ranks.ended()
        code = error.get_first_failure()[1].exitcode
        if not quiet:
            print(error, file=sys.stderr)
        sys.exit(128 - code if code < 0 else code)
    except SignalException as error:
        ranks.ended()
        ranks.exit_like(error.sigval)


if __name__ == "__main__":
    main()
