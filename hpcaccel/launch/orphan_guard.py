"""Program that kills the ranks of a launcher that was killed. The launcher starts it; nothing imports it.

It reads lines from a pipe that the launcher holds open: the process groups of the ranks that run now, or the word
``done``. The pipe ends when the launcher does, by whatever signal.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Read the pipe on stdin to its end, then kill the process groups of the last line."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(one, signal.SIG_IGN)
    lines = sys.stdin.read().splitlines()
    for word in [] if lines[-1:] in ([], ["done"]) else lines[-1].split():
        try:
            os.killpg(int(word), signal.SIGKILL)
        except ProcessLookupError:
            continue  # the rank had ended


if __name__ == "__main__":
    main()
