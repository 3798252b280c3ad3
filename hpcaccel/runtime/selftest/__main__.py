"""The program of each rank of ``hpcaccel test``: ``python -m hpcaccel.runtime.selftest --results DIR``.

The checks run in a child process. If it is killed, this process records the signal and still exits with code 0: after
any other code, srun would kill the ranks that are still running.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpcaccel.core.parent_death import die_with
from hpcaccel.runtime.selftest.check_runner import ResultLog, last_lines, rank_of_variables

__all__ = ["main"]

LINGER_SECONDS = 150.0
_LAST = (b'"check":"end"', b'"state":"timeout"', b'"state":"killed"')
"""Parts of the last line of a rank that has ended."""


def main(arguments: Sequence[str]) -> int:
    """Run the self-test of this rank in a child process. Returns its exit code, or 0 if it was killed."""
    parent = os.getpid()
    child = os.fork()  # before torch is imported
    if child == 0:
        die_with(parent)
        code = 1
        try:
            from hpcaccel.runtime.selftest.self_test import main as run

            code = run(arguments)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    results = Path(arguments[list(arguments).index("--results") + 1])
    if code < 0:
        log = ResultLog(results, rank=rank_of_variables(), pid=child)
        log.write("process", "killed", message=f"was killed by {signal.Signals(-code).name}")
    if code <= 0 and os.environ.get("SLURM_STEP_ID"):
        _wait_for_other_ranks(results)
    return max(code, 0)


def _wait_for_other_ranks(results: Path) -> None:
    """Wait until the ranks that have results have ended, for at most ``LINGER_SECONDS``.

    hpcaccel starts srun with ``--wait=60``: a minute after the first rank has ended, it kills the others, which may
    still wait for this one.
    """
    end = time.monotonic() + LINGER_SECONDS
    while time.monotonic() < end:
        if all(any(word in line for word in _LAST) for line in last_lines(results).values()):
            return
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
