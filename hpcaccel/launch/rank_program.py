"""Runs a small program that uses torch in another Python process, and reads the JSON line that it prints.

The commands do not import torch themselves: the import takes seconds, and a broken installation may end the process.
"""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hpcaccel.errors import HpcaccelError

__all__ = ["RankProgramFailed", "run_rank_program"]


class RankProgramFailed(HpcaccelError):
    """The program did not print a result. The message is its reason: the last line of its error output, or a signal."""


def run_rank_program(
    name: str, arguments: Sequence[str] = (), *, python: str = sys.executable, timeout_seconds: float = 120
) -> dict[str, Any]:
    """The JSON object that a program of this folder prints.

    The program gets no GPU work to do and no standard input. The current directory is in its module search path.

    Args:
        name: the program's file, such as ``torch_program.py``.
        python: the Python that runs it, which has torch and may not have hpcaccel.

    Raises:
        RankProgramFailed: the program failed, was killed, or did not end in time.
    """
    source = pkgutil.get_data("hpcaccel.launch", name)
    assert source is not None
    try:
        done = subprocess.run(
            [python, "-c", source.decode(), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    except subprocess.TimeoutExpired:
        raise RankProgramFailed(f"{python} did not finish within {timeout_seconds:g} s") from None
    except OSError as error:
        raise RankProgramFailed(f"{python} cannot be started: {error.strerror}") from None
    if done.returncode < 0:
        raise RankProgramFailed(f"{python} was ended by signal {-done.returncode}")
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RankProgramFailed(lines[-1] if lines else f"{python} exited with code {done.returncode}")
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(b"{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise RankProgramFailed(f"{python} exited with code 0 without printing a result")
