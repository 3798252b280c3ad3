"""Run the steps of a build: their output goes to a file, and the progress is reported from time to time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .errors import DevClusterError

Report = Callable[[str], None]

PROGRESS_SECONDS = 15.0
TAIL_LINES = 20


def run_step(
    name: str,
    command: Sequence[str],
    *,
    folder: Path,
    log: Path,
    report: Report,
    count: Callable[[str], bool] | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run one command in `folder`. Raises DevClusterError with the end of its output if it fails.

    `count` returns whether a line of the output stands for one compiled file; their number is reported as progress.
    """
    report(name)
    pieces, told = 0, time.monotonic()
    with log.open("a", errors="replace") as out:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                out.write(line)
                pieces += count is not None and count(line)
                if count is not None and time.monotonic() - told > PROGRESS_SECONDS:
                    report(f"{name}: {pieces} files")
                    told = time.monotonic()
            code = child.wait()
        except BaseException:  # Ctrl-C: make ends what it has started
            child.terminate()
            child.wait()
            raise
    if code:
        tail = "".join(f"\n  | {line}" for line in log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        raise DevClusterError(f"{name} failed with exit code {code}; see {log}{tail}")
