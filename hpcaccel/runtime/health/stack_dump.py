"""Where all threads of this rank are, in ``attempts/<n>/stacks/<rank>.txt``.

Asked for by a number in the file ``asked``, the heartbeat's thread writes them, while nothing else can run. A rank that
holds Python's lock does not come to that: it gets SIGURG, whose handler is C and needs no lock. Of all signals this is
the one that is passed over by processes that do not know it: workers, the programs that a script starts, and ranks
that do not use the runtime.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

from hpcaccel.core.run_dir import make_folder

__all__ = ["SIGNAL", "Stacks"]

SIGNAL = signal.SIGURG


class Stacks:
    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._answered = 0
        self._file = -1

    def register(self) -> None:
        make_folder(self._folder)
        # Open for good: faulthandler writes to the number, and knows no names.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._folder / f"{self._rank}.txt", flags, 0o640)
        self._answered = self._asked()
        faulthandler.register(SIGNAL, file=self._file, all_threads=True)
        os.register_at_fork(after_in_child=_unregister)

    def answer(self) -> None:
        """Write the stacks if somebody has asked for them since the last time."""
        asked = self._asked()
        if asked > self._answered:
            self._answered = asked
            self.dump()

    def dump(self) -> None:
        os.write(self._file, f"\n{time.strftime('%Y-%m-%dT%H:%M:%S')} rank {self._rank}\n".encode())
        faulthandler.dump_traceback(file=self._file, all_threads=True)

    def _asked(self) -> int:
        # Read, not looked at: NFS asks the server for a file that is opened, and answers from its memory otherwise.
        try:
            return int((self._folder / "asked").read_text() or 0)
        except (OSError, ValueError):
            return 0


def _unregister() -> None:
    """Forked workers are no ranks, and would write into their rank's file."""
    faulthandler.unregister(SIGNAL)
