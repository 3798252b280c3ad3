"""What runs on the nodes before the ranks: a step that is watched, asked and killed as ranks are."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from hpcaccel.node.child_processes import dying_with_us, shell_code

__all__ = ["BeforeRanks"]


class BeforeRanks:
    """One command, on this node or through srun on all of them. Asked to stop, it ends: what follows is decided later.

    Args:
        command: as given to exec.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object
        self._process = subprocess.Popen(
            command,
            env=dict(os.environ if env is None else env),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            preexec_fn=dying_with_us(signal.SIGTERM),
            start_new_session=True,
        )

    def poll(self) -> int | None:
        code = self._process.poll()
        return None if code is None else shell_code(code)

    @property
    def said(self) -> list[str]:
        """What it has printed, line by line."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace").splitlines()

    def ask(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def dump(self) -> None:
        pass  # it has no stacks that anybody would want to see

    def wake(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
