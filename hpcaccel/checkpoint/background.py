"""The rank's side of background saves: shared memory, a writer process, and the save in flight.

The training thread plans the save with the other ranks, copies the tensors into shared memory, sends an order to the
rank's writer process and continues. The writers finish the commit protocol (see ``commit``) among themselves through a
results folder beside the checkpoint. The commit therefore needs neither the training thread, which may be in the middle
of a long step, nor a process group that training uses: it takes place as soon as all files are on the disk.

A rank detects the end of a save through its own writer's pipe, which it polls once per step while a save is in flight.
The ranks exchange their results together with the agreement on when to stop, so all of them settle a save, or raise its
error, at the same step. ``conclude`` waits in two phases: each rank waits for its own file; then, if all files are
written, all ranks wait for rank 0's commit. So no rank waits for a commit that cannot happen.

The writers exit with their ranks. A rank that exits with a save in flight waits for it, up to ``EXIT_WAIT_SECONDS``.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.save_plan import AgreedPlan
from hpcaccel.checkpoint.saving import remove_unfinished
from hpcaccel.checkpoint.snapshot_memory import SnapshotMemory, no_room
from hpcaccel.checkpoint.writer import WriterProcess
from hpcaccel.checkpoint_files import SavePaths
from hpcaccel.core.rank_records import Save
from hpcaccel.errors import CheckpointError

__all__ = ["BackgroundWriter", "PendingSave", "Progress"]

log = logging.getLogger(__name__)

Progress = Literal["done", "busy", "failed"]

EXIT_WAIT_SECONDS = (10.0, 2.0)
"""Timeouts of the two waits at exit if a save is in flight. First every rank waits for its own file, which may hold the
newest state. Then rank 0 waits for the commit, which needs the files of all ranks."""
SLACK_BYTES = 64 << 10  # the text of values may be longer in the next snapshot
LONE_WAIT_SECONDS = 120.0
"""Timeout of ``wait_alone``."""


@dataclass
class PendingSave:
    """A save in flight.

    Args:
        what: the beginning of this save's error messages.
        reason: why the checkpoint is saved, for display.
        begun: when the save began, by ``time.monotonic``.
        stall: seconds for which the save blocked training.
        from_memory: whether the checkpoint is a snapshot that was taken before.
        is_hurried: whether the writer was told to write at full speed.
    """

    what: str
    paths: SavePaths
    reason: str
    begun: float
    stall: float = 0.0
    from_memory: bool = False
    is_hurried: bool = False

    def record(self, *, ended: float, size: int, reports: dict[str, Any] | None = None) -> Save:
        """The record of this save after its commit.

        Args:
            ended: time of the commit, by ``time.monotonic``.
            size: size of the checkpoint in bytes.
            reports: those of the writer; None if the save blocked training until its commit.
        """
        found = reports or {}
        return Save(
            step=self.paths.step,
            reason=self.reason,
            stall_seconds=self.stall,
            seconds=ended - self.begun,
            bytes=size,
            written_bytes=size - found.get("linked_bytes", 0),
            waited_seconds=found.get("waited", 0.0),
            background=reports is not None,
            time=time.time(),
            from_memory=self.from_memory,
        )


class BackgroundWriter:
    """One rank's shared memory, writer process and save in flight.

    All ranks call ``has_room``, ``start`` and ``conclude`` together.
    """

    def __init__(self, ranks: CheckpointRanks, *, local_world_size: int) -> None:
        self._ranks = ranks
        self._local_world_size = local_world_size
        self.memory: SnapshotMemory | None = None
        self.pending: PendingSave | None = None
        """The save in flight. It stays here until all ranks have detected its end. None if there is none."""
        self.spread_seconds = 0.0
        """Longest time over which the writes of the next save are spread."""
        self._held_step: int | None = None
        """Step of the committed checkpoint whose bytes are in ``memory``."""
        self._writer: WriterProcess | None = None
        self._problem: str | None = None
        self._room_for: AgreedPlan | None = None
        self._has_room = False
        self._at_exit = partial(_wait_at_exit, weakref.ref(self), os.getpid())

    # -- starting

    def has_room(self, what: str, plan: AgreedPlan) -> bool:
        """Whether every rank has memory and a writer for this save, so that it can be written in the background. This
        is checked once per plan. If a rank lacks one of the two, the reason is logged."""
        if self._room_for is not plan:
            self._room_for = plan
            refusal = self._refusal(what, plan.file_bytes)
            self._has_room = refusal is None
            if refusal is not None and self._ranks.is_first:
                log.warning("checkpoints are not written in the background; training waits for each save: %s", refusal)
        return self._has_room

    def _refusal(self, what: str, size: int) -> str | None:
        """Why a rank has no memory or no writer for its snapshot; None if all ranks have both.

        Args:
            size: size of this rank's snapshot in bytes.
        """

        def check() -> str | None:
            fits = self.memory is not None and self.memory.size >= size and self.memory.descriptor >= 0
            return None if fits else no_room(size, of=self._local_world_size)

        def make() -> str | None:
            try:
                if self.memory is None or self.memory.size < size or self.memory.descriptor < 0:
                    self._stop_writer()
                    self.memory = None  # free the old memory before allocating the new memory
                    self.memory = SnapshotMemory(size + SLACK_BYTES)
                self._running_writer()
            except OSError as error:
                return (
                    f"cannot allocate {size:,} bytes of snapshot memory or start the writer process: "
                    f"{error.strerror or error}"
                )
            return None

        # All ranks check before any rank allocates: after an allocation, less memory would appear to be free.
        return self._ranks.reduce(what, check, _first_of) or self._ranks.reduce(what, make, _first_of)

    def _running_writer(self) -> WriterProcess:
        if self._writer is None or self._writer.is_dead:
            assert self.memory is not None
            self._stop_writer()
            self._writer = WriterProcess(self.memory.descriptor, self.memory.size)
            atexit.register(self._at_exit)
        return self._writer

    def start(self, pending: PendingSave, order: dict[str, Any], chunks: bytes, *, problem: str | None = None) -> None:
        """Order the writer to write the snapshot in ``memory``. Errors are reported by ``progress``.

        Args:
            chunks: see ``AgreedPlan``.
            problem: why this rank has no snapshot; None if it has one. Without a snapshot nothing is sent, and the save
                fails on all ranks.
        """
        assert self.pending is None
        self.pending = pending
        self._problem = problem
        order |= {"base": self._held_step, "seconds": self.spread_seconds}
        self._held_step = None
        if problem is None:
            try:
                self._running_writer().send(order, chunks)
            except OSError as error:
                self._problem = f"cannot send the save to the writer process: {error.strerror or error}"

    # -- waiting

    def progress(self) -> Progress:
        """State of the save on this rank. Rank 0 is done after the commit, other ranks when their file is written."""
        if self._problem is None and self._writer is not None:
            problem = self._writer.poll()
            if self._writer.reports.keys() >= self._needed_reports:
                return "done"  # even if the process has exited since
            self._problem = problem
        return "busy" if self._problem is None else "failed"

    @property
    def _needed_reports(self) -> set[str]:
        return {"written", "committed"} if self._ranks.is_first else {"written"}

    def _wait(self, report: str, *, seconds: float | None = None) -> bool:
        """Wait until this rank's writer has sent ``report`` or has failed. Returns False on a timeout."""
        self.hurry()
        deadline = None if seconds is None else time.monotonic() + seconds
        while self.progress() != "failed":
            assert self._writer is not None
            if report in self._writer.reports:
                return True
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            self._writer.wait(min(left, 1.0))
        return True

    def hurry(self) -> None:
        """Let the save in flight continue at full speed. Not collective."""
        if self.pending is not None and self._writer is not None and not self.pending.is_hurried:
            self.pending.is_hurried = True
            self._writer.hurry()

    def conclude(self, *, wait: bool) -> dict[str, Any]:
        """End the save in flight.

        Args:
            wait: whether to wait for the end of the save; False if all ranks have already detected it.

        Returns:
            The writer's reports; on rank 0 they include the commit.

        Raises:
            CheckpointError: on all ranks, if the save failed on any of them. The files of this save are removed.
        """
        pending = self.pending
        assert pending is not None

        def check(report: str) -> None:
            if wait:
                self._wait(report)
            if self.progress() == "failed":
                raise CheckpointError(self._problem)

        try:
            self._ranks.run(pending.what, lambda: check("written"))
            self._ranks.first(pending.what, lambda: check("committed"))
        except BaseException:
            self._abandon(pending)
            raise
        return self.forget()

    def wait_alone(self) -> None:
        """Wait for the commit of a save in flight before rank 0 saves alone. On a timeout, stop the writer."""
        if self.pending is not None and not self._wait("committed", seconds=LONE_WAIT_SECONDS):
            self._stop_writer()
            self._problem = f"it was not committed within {LONE_WAIT_SECONDS:g} s"

    def forget(self) -> dict[str, Any]:
        """Clear the committed save in flight. Returns the writer's reports on it."""
        reports = {} if self._writer is None else self._writer.take_reports()
        if self.pending is not None:
            self._held_step, self.pending = self.pending.paths.step, None
        return reports

    def _abandon(self, pending: PendingSave) -> None:
        """Stop the writers of all ranks, then remove the files of the unfinished save."""
        self.pending = None
        self._stop_writer()
        try:
            self._ranks.run(pending.what, lambda: None)
        finally:
            if self._ranks.is_first:
                remove_unfinished(pending.paths)

    # -- ending

    def wait_at_exit(self) -> None:
        """Wait for the save in flight before this rank exits."""
        for report, seconds in zip(("written", "committed"), EXIT_WAIT_SECONDS, strict=True):
            if report in self._needed_reports and not self._wait(report, seconds=seconds):
                return

    def _stop_writer(self) -> None:
        if self._writer is not None:
            atexit.unregister(self._at_exit)
            self._writer.stop()
            self._writer = None

    def close(self) -> None:
        """Stop the writer; a save in flight may be lost. Not collective."""
        self.pending = None
        self._stop_writer()
        self.memory = None


def _first_of(reasons: list[str | None]) -> str | None:
    return next(filter(None, reasons), None)


def _wait_at_exit(reference: weakref.ref[BackgroundWriter], owner: int) -> None:
    """Exit handler: wait for a save that is still in flight, as may be the case if the program has failed."""
    background = reference()
    if background is not None and background.pending is not None and os.getpid() == owner:
        background.wait_at_exit()
