"""The batch step's side of the sender: it starts the process, and restarts it if it is killed."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Sequence

from hpcaccel.core.parent_death import dying_with_us

__all__ = ["SenderProcess"]

log = logging.getLogger(__name__)

MOST_STARTS = 10
"""A sender that ends by itself or is killed is started again, up to this number of starts in a batch step."""
END_SECONDS, HURRY_SECONDS = 10.0, 2.0
"""How long the sender may take for its last look: usually, and (the second value) if the job is requeued, or Slurm ends
it. After a requeue, the next batch step delivers the rest."""


class SenderProcess:
    """The sender of one batch step.

    Args:
        command: the command line of the sender, without the time from which on events count.
        unmarked: environment variable that the sender must not inherit: the batch step kills processes that have it.
    """

    def __init__(self, command: Sequence[str], *, unmarked: str, since: float | None = None) -> None:
        self._command = [*command, repr(time.time() if since is None else since)]
        self._unmarked = unmarked
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def keep(self) -> None:
        """Start the sender unless it runs. A failure to do so is logged; it affects nothing else."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._starts >= MOST_STARTS:
            return
        self._starts += 1
        environment = {name: value for name, value in os.environ.items() if name != self._unmarked}
        self._close()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                env=environment,
                preexec_fn=dying_with_us(),
                start_new_session=True,
            )
        except OSError as error:
            log.warning(f"cannot start the sender of notices: {error.strerror}")

    def end(self, *, hurry: bool) -> None:
        """Let the sender deliver what is left, then end it. Takes a limited time.

        Args:
            hurry: whether little time is left, or a later batch step delivers the rest.
        """
        if self._process is None:
            return
        self.keep()
        self._close()
        try:
            self._process.wait(HURRY_SECONDS if hurry else END_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the receiver of notices does not respond: not waiting any longer")
            self._process.kill()
            self._process.wait()

    def _close(self) -> None:
        """Close the sender's standard input, which asks it to end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
