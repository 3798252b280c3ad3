"""Kill a forked process at a chosen moment: at its n-th file, folder or process event."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.slurm.fake_slurm import FakeSlurm

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree", "subprocess.Popen"}
NOT_REACHED = 77


class SharedSlurm(FakeSlurm):
    """An in-memory Slurm that several processes share through a file."""

    file: Path

    def _called(self, name: str) -> None:
        if self.file.exists():
            self.__dict__.update(pickle.loads(self.file.read_bytes()))
        super()._called(name)

    def save(self) -> None:
        fresh = self.file.with_name(f"{self.file.name}.new")
        fresh.write_bytes(pickle.dumps(self.__dict__))
        fresh.rename(self.file)

    def sbatch(self, *args: Any, **more: Any) -> str:
        job_id = super().sbatch(*args, **more)
        self.save()
        return job_id

    def cancel(self, job_id: str, *, only_pending: bool = False) -> None:
        super().cancel(job_id, only_pending=only_pending)
        self.save()

    def seen(self) -> SharedSlurm:
        self._called("seen")
        return self


def killed_at(moment: int, action: Callable[[], object], *, number: int = signal.SIGKILL) -> bool:
    """Run ``action`` in a fork that receives a signal at its ``moment``-th event, counted from the first folder that
    it creates; False if it has fewer events."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _arm(moment, number)
            action()
            code = NOT_REACHED
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == NOT_REACHED, "it failed by itself"
        return False
    assert os.WTERMSIG(status) == number
    return True


def _arm(moment: int, number: int) -> None:
    left = moment
    begun = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left, begun
        if event not in EVENTS or (event == "open" and not _writes(args)):
            return
        begun = begun or event == "os.mkdir"
        if not begun:
            return
        if left == 0:
            left = -1
            os.kill(os.getpid(), number)
        left -= 1

    sys.addaudithook(hook)


def _writes(args: tuple[Any, ...]) -> bool:
    flags = args[2]
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
