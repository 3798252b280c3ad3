"""A save that is written while the training goes on: one at a time, by a process of its own on each rank.

What happens to it::

    training thread, all ranks together        writer of each rank             writer of rank 0
    plan, as for any save
    snapshot into shared memory
    one line to the writer ───────────────────▶ direct write, CRC, fsync
    next step …                                 its CRCs into .step_N.results ─▶ waits for those of all ranks
    …                                                                            index, manifest, rename, old ones away
    a tick says that all are done ◀──────────── "written"                       "committed"

The writers of the other ranks tell rank 0's through a folder beside the checkpoint. So the commit needs no training
thread, which may be in the middle of a long step, no message on a group that the training uses at that time, and no
port; and it comes as soon as the last byte is on the disk. The training learns of it from its own writer's pipe, looked
at once a step and only while a save is under way. What all ranks know travels with the agreement on when to stop: the
same step sees the end of a save, or its error, on every rank.

Waiting for it (``drain``) goes in two halves, so that nobody waits for what cannot come: each rank for its own file,
then, when all have theirs, all for rank 0's commit. Killed at any moment: the writers leave with their ranks, and what
was not renamed never counts.
"""

from __future__ import annotations

import atexit
import os
import shutil
import time
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from hpcaccel.checkpoint.rank_agreement import Ranks
from hpcaccel.checkpoint.snapshot_memory import Memory, no_room
from hpcaccel.checkpoint.writer_process import WriterProcess
from hpcaccel.errors import CheckpointError

__all__ = ["Background", "Job", "Progress"]

Progress = Literal["done", "busy", "failed"]

EXIT_WAIT_SECONDS = (10.0, 2.0)
"""How long a rank that fails goes on living for its file, which may be of the newest state there is, and then rank 0
for the commit, to which every rank must have come."""
LONE_WAIT_SECONDS = 120.0


@dataclass(frozen=True)
class Job:
    """A save under way.

    Args:
        what: begins its errors' messages.
        step: of the training.
        reason: why it is saved, for people.
        begun: when the save began, by ``time.monotonic``.
        order: what the writer is told.
    """

    what: str
    step: int
    reason: str
    begun: float
    order: dict[str, Any]


class Background:
    """Memory and writer of one rank, and the save that is under way. The ranks call alike, but for ``progress``."""

    def __init__(self, ranks: Ranks, *, local_world_size: int) -> None:
        self._ranks = ranks
        self._local_world_size = local_world_size
        self.memory: Memory | None = None
        self.job: Job | None = None
        """Of which it is not yet said, on all ranks, how it went."""
        self._writer: WriterProcess | None = None
        self._problem: str | None = None
        self._at_exit = partial(_finish, weakref.ref(self), os.getpid())

    def refusal(self, what: str, size: int) -> str | None:
        """Why this save must be waited for; None when the memory and the writer are there, on all ranks.

        Args:
            size: bytes of this rank's file.
        """

        def reason() -> str | None:
            fits = self.memory is not None and self.memory.size >= size and self.memory.descriptor >= 0
            return None if fits else no_room(size, of=self._local_world_size)

        def first_of(reasons: list[str | None]) -> str | None:
            return next((item for item in reasons if item is not None), None)

        def make() -> str | None:
            try:
                self._make(size)
            except OSError as error:
                return f"memory for a snapshot, or its writer, cannot be had: {error.strerror or error}"
            return None

        # All look before any takes memory: who looks later would see what the others have taken.
        return self._ranks.reduce(what, reason, first_of) or self._ranks.reduce(what, make, first_of)

    def _make(self, size: int) -> None:
        if self.memory is None or self.memory.size < size or self.memory.descriptor < 0:
            self._stop_writer()
            self.memory = None  # the old one is given back before the new one is asked for
            self.memory = Memory(size)
        self._have_writer()

    def _have_writer(self) -> WriterProcess:
        if self._writer is None or self._writer.is_dead:
            assert self.memory is not None
            self._stop_writer()
            self._writer = WriterProcess(self.memory)
            atexit.register(self._at_exit)
        return self._writer

    def start(self, job: Job, index: bytes) -> None:
        """Hand the snapshot in ``memory`` to the writer. What goes wrong is said by ``progress``.

        Args:
            index: for rank 0's writer, see ``writer_commit``; empty elsewhere.
        """
        assert self.job is None
        self.job = job
        self._problem = None
        try:
            self._have_writer().send(job.order, index)
        except OSError as error:
            self._problem = f"the writer cannot be reached: {error.strerror or error}"

    def give_up(self, job: Job, problem: str) -> None:
        """This rank has no snapshot: the others hear of it as of an error of the writer."""
        self.job = job
        self._problem = problem

    def progress(self) -> Progress:
        """How far this rank is: rank 0 is done when the checkpoint is committed, the others when their file is."""
        if self._problem is None and self._writer is not None:
            problem = self._writer.look()
            if self._writer.heard >= self._wanted:
                return "done"  # even if the process has gone since
            self._problem = problem
        return "busy" if self._problem is None else "failed"

    @property
    def _wanted(self) -> set[str]:
        return {"written", "committed"} if self._ranks.is_first else {"written"}

    def wait(self, word: str, *, seconds: float | None = None) -> bool:
        """Wait until this rank's writer has said ``word``, or has failed; False when the time is over first."""
        give_up = None if seconds is None else time.monotonic() + seconds
        while self.progress() != "failed":
            assert self._writer is not None
            if word in self._writer.heard:
                return True
            left = 1.0 if give_up is None else give_up - time.monotonic()
            if left <= 0:
                return False
            self._writer.wait(min(left, 1.0))
        return True

    def conclude(self, *, wait: bool) -> dict[str, Any] | None:
        """The save under way is over: on rank 0 what its writer said of the commit.

        Args:
            wait: it may still be under way. Without it all ranks know that it is not.

        Raises:
            CheckpointError: on all ranks, when it failed on any of them. Nothing of it is left.
        """
        job = self.job
        assert job is not None

        def written() -> None:
            if wait:
                self.wait("written")
            self._refuse()

        def committed() -> None:
            if wait:
                self.wait("committed")
            self._refuse()

        try:
            self._ranks.run(job.what, written)
            self._ranks.first(job.what, committed)
        except BaseException:
            self._abandon(job)
            raise
        return self.forget()

    def wait_alone(self) -> None:
        """For a save of rank 0 without the others: until its own writer is through, or has waited too long."""
        if self.job is not None and not self.wait("committed", seconds=LONE_WAIT_SECONDS):
            self._stop_writer()
            self._problem = "the other ranks' files did not come"

    def forget(self) -> dict[str, Any] | None:
        """Nothing is under way any more: on rank 0 what its writer said of the commit."""
        self.job = None
        return None if self._writer is None else self._writer.forget()

    def _refuse(self) -> None:
        if self.progress() == "failed":
            raise CheckpointError(self._problem)

    def _abandon(self, job: Job) -> None:
        """Nobody writes any more; then what there is goes."""
        self.job = None
        self._stop_writer()
        try:
            self._ranks.run(job.what, lambda: None)
        finally:
            if self._ranks.is_first:
                for name in ("temporary", "results"):
                    shutil.rmtree(job.order[name], ignore_errors=True)  # what stays is removed before the next save

    def wait_at_exit(self) -> None:
        """For a rank that dies with a save under way."""
        for word, seconds in zip(("written", "committed"), EXIT_WAIT_SECONDS, strict=True):
            if word in self._wanted and not self.wait(word, seconds=seconds):
                return

    def _stop_writer(self) -> None:
        if self._writer is not None:
            atexit.unregister(self._at_exit)
            self._writer.stop()
            self._writer = None

    def close(self) -> None:
        """Let the writer go; what is under way is lost. Called by one rank or all."""
        self.job = None
        self._stop_writer()
        self.memory = None


def _finish(reference: weakref.ref[Background], owner: int) -> None:
    """The program ends. Where all goes well somebody has waited already."""
    background = reference()
    if background is not None and background.job is not None and os.getpid() == owner:
        background.wait_at_exit()
