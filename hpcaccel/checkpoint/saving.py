"""The save of one step: prepare the directory, then begin, write, gather and publish (see ``commit``)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import commit, manifest_writer, save_reports
from hpcaccel.checkpoint.attached_files import write_attached
from hpcaccel.checkpoint.block_files import BlockSummary
from hpcaccel.checkpoint.dcp_storage import ShardWriter, stored_lengths, tensor_of
from hpcaccel.checkpoint.loading import quarantine, set_aside
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.rank_blocks import block_of, stored_file
from hpcaccel.checkpoint.save_content import FirstRank, collect
from hpcaccel.checkpoint.save_plan import AgreedPlan, PlanCache
from hpcaccel.checkpoint.snapshot_memory import SnapshotMemory
from hpcaccel.checkpoint.training_state import TrainingState
from hpcaccel.checkpoint.written_file import WrittenFile
from hpcaccel.checkpoint_files import SavePaths, manifest
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["Branch", "Retention", "SaveOperation", "remove_unfinished"]

log = logging.getLogger(__name__)


class Branch:
    """Record of the checkpoints that belong to this training, not to an abandoned branch. Complete only on rank 0.

    Training that resumes from an older checkpoint abandons the later ones; its next save renames them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._own_steps: set[int] = set()
        """Steps that this training has saved in this directory or resumed from. While the checkpoint of such a step is
        intact, the step is not written again."""
        self._lone_steps: set[int] = set()
        """Steps that rank 0 has saved without the other ranks."""
        self._base_step: int | None = None
        """Step of this training's newest checkpoint; 0 if the training started from scratch and has none yet; None if
        it has neither resumed nor started from scratch. Checkpoints of later steps are abandoned."""

    def start_anew(self) -> None:
        """Record that this training starts at step 0."""
        self._base_step = 0

    def resume(self, step: int, *, alone: bool) -> None:
        """Record that this training has loaded ``step``, which rank 0 saved without the other ranks if ``alone``."""
        self._base_step = step
        (self._lone_steps if alone else self._own_steps).add(step)

    def add(self, step: int, *, alone: bool) -> None:
        """Record that this training has committed ``step``, which rank 0 saved without the other ranks if ``alone``."""
        (self._lone_steps if alone else self._own_steps).add(step)
        if self._base_step is not None:
            self._base_step = step

    def contains(self, path: Path) -> bool:
        """Whether ``path`` belongs to this training."""
        steps = self._own_steps | self._lone_steps
        return any(path == self._directory / checkpoint_files.checkpoint_name(step) for step in steps)

    def make_way(self, paths: SavePaths, *, alone: bool) -> bool:
        """Prepare the directory for a save: remove files left by killed saves, rename abandoned checkpoints and a
        damaged one of the same step.

        Args:
            alone: whether rank 0 saves without the other ranks.

        Returns:
            Whether this step is already committed and must not be written again.
        """
        if paths.step in self._lone_steps and not alone:
            self._lone_steps.discard(paths.step)  # the save by all ranks replaces it
        commit.clean(self._directory)
        for other, path in checkpoint_files.step_directories(self._directory):
            if self._is_abandoned(other, now=paths.step):
                kept = set_aside(path, checkpoint_files.SUPERSEDED)
                log.warning(
                    "renamed %s to %s: this save replaces it, or the training continues from an earlier step",
                    path.name,
                    kept.name,
                )
        if not paths.final.exists():
            return False
        try:
            manifest.read(paths.final)
        except Damaged as error:
            quarantine(paths.final, str(error))
            return False
        return True

    def _is_abandoned(self, step: int, *, now: int) -> bool:
        if step in self._own_steps or step in self._lone_steps:
            return False
        return step == now or (self._base_step is not None and step > self._base_step)


class Retention:
    """Deletes old checkpoints.

    Args:
        keep: see ``CheckpointEngine``; also ``keep_every``.
    """

    def __init__(self, directory: Path, *, keep: int | None, keep_every: int | None) -> None:
        self._directory = directory
        self.rules: dict[str, Any] | None = None if keep is None else {"keep": keep, "keep_every": keep_every}
        """Arguments of ``commit.retire``; None keeps all checkpoints."""
        self._deletion: threading.Thread | None = None

    def apply(self, step: int) -> None:
        """After the commit of ``step``, rename old checkpoints now, and delete them in a thread: deleting large files
        can take a long time."""
        if self.rules is None:
            return
        if doomed := commit.retire(self._directory, newest_step=step, **self.rules):
            self._deletion = threading.Thread(target=commit.delete, args=(doomed,), name="checkpoint-deletion")
            self._deletion.start()

    def wait(self) -> None:
        """Wait for the deletion in progress."""
        if self._deletion is not None:
            self._deletion.join()
            self._deletion = None


class SaveOperation:
    """The save of one step. All ranks call ``plan``, then either ``write``, or ``snapshot`` and ``order``.

    Args:
        facts: the save's step, epoch, reason and so on, for the manifest.
        fill: see ``CheckpointEngine.save``.
    """

    def __init__(
        self,
        ranks: CheckpointRanks,
        paths: SavePaths,
        state: TrainingState,
        facts: dict[str, Any],
        fill: Callable[[Path], None] | None,
    ) -> None:
        self.what = f"the checkpoint of step {paths.step} cannot be saved"
        self.paths = paths
        self._ranks = ranks
        self._state = state
        self._facts = facts
        self._fill = fill
        self._first_rank: FirstRank | None = None
        self._attached: list[WrittenFile] = []
        """The files of another library, see ``TrainingState.attached``."""

    def make_way(self, branch: Branch, *, alone: bool) -> bool:
        """``Branch.make_way`` on rank 0. Unless ``fill`` or another library may still change the state, the answer
        tells the other ranks the parameters of rank 0, too: one message less during which the training waits."""

        def prepare() -> tuple[bool, FirstRank | None]:
            is_committed = branch.make_way(self.paths, alone=alone)
            is_final = not is_committed and not self._has_extra and self._ranks.world_size > 1
            return is_committed, FirstRank.of(self._state) if is_final else None

        is_committed, self._first_rank = self._ranks.first(self.what, prepare)
        return is_committed

    @contextmanager
    def removed_on_error(self) -> Iterator[None]:
        """Remove the temporary directories if the save fails on any rank."""
        try:
            yield
        except CheckpointError:
            if self._ranks.is_first:
                remove_unfinished(self.paths)
            raise

    def plan(self, plans: PlanCache, *, background: bool) -> tuple[AgreedPlan, DefaultSavePlanner]:
        """Call ``fill``, write attached files, agree on a plan, and create the temporary directory and, for a
        save in the background or of several blocks, the results folder."""
        if self._has_extra:
            self._write_extra()
        first = self._first_rank
        if first is None and self._ranks.world_size > 1:
            first = self._ranks.first(self.what, lambda: FirstRank.of(self._state))

        def begin() -> None:
            commit.begin(self.paths.temporary)
            if background or block_of(0, self._ranks.world_size) is not None:
                commit.begin(self.paths.results)

        return plans.plan(
            self._ranks,
            what=self.what,
            collect=lambda: collect(self._state, rank=self._ranks.rank, first=first),
            begin=begin,
        )

    def write(self, plan: AgreedPlan, planner: DefaultSavePlanner, memory: SnapshotMemory | None) -> int:
        """Write this rank's file, wait until the other ranks have written theirs, and commit.

        Returns:
            The total size in bytes of all ranks' files and the index.

        Raises:
            CheckpointError: on all ranks, if anything failed on any of them.
        """
        facts = {**self._facts, "attached": [file.file for file in self._attached]} if self._attached else self._facts
        ranks, paths = self._ranks, self.paths
        block = block_of(ranks.rank, ranks.world_size)
        writer = ShardWriter(
            paths.temporary,
            rank=ranks.rank,
            ranks=ranks.world_size,
            facts=facts,
            wide=plan.wide,
            others=plan.others,
            memory=memory,
        )

        def publish(files: Sequence[WrittenFile], blocks: Sequence[BlockSummary] | None = None) -> int:
            described = manifest_writer.describe(**facts)
            files = [*files, *self._attached]
            size = commit.write_manifest(paths.temporary, files=files, facts=described, block=block, blocks=blocks)
            rmtree(paths.results, ignore_errors=True)
            if self._has_extra:
                commit.adopt(paths.extra, paths.temporary)
            commit.publish(paths.temporary, paths.final)
            return size

        def publish_all(written: list[list[WrittenFile]]) -> int:
            files = [file for of_rank in written for file in of_rank]
            if len(files) != plan.files:
                raise CheckpointError(f"{len(files)} of {plan.files} files were written")
            return publish(files)

        def report() -> None:
            for file in writer.write(plan.own, planner):
                save_reports.deliver(paths, file, block=block)

        if block is None:
            return ranks.reduce(self.what, lambda: writer.write(plan.own, planner), publish_all)
        ranks.run(self.what, report)
        return ranks.first(self.what, lambda: publish([], save_reports.gather_blocks(paths, plan.files, lambda: None)))

    def snapshot(self, plan: AgreedPlan, planner: DefaultSavePlanner, memory: SnapshotMemory) -> list[int]:
        """Copy the contents of this rank's file into ``memory``, from which the writer process writes it. Returns the
        numbers of the chunks that ``memory`` held already."""
        tensors = (tensor_of(item, planner) for item in plan.own.items)
        return memory.snapshot(tensors, stored_lengths(plan.own), compare=True)

    def order(self, plan: AgreedPlan, retention: dict[str, Any] | None) -> dict[str, Any]:
        """The order for this rank's writer process, as JSON values; see ``writer``."""
        paths = self.paths
        order = {
            "directory": str(paths.directory),
            "step": paths.step,
            "attempt": paths.attempt,
            "file": stored_file(self._ranks.rank, self._ranks.world_size),
            "block": block_of(self._ranks.rank, self._ranks.world_size),
            "lengths": stored_lengths(plan.own),
            "others": plan.others,
        }
        if self._ranks.is_first:
            facts = manifest_writer.describe(**self._facts)
            order |= {"files": plan.files, "facts": facts, "retention": retention}
        return order

    @property
    def _has_extra(self) -> bool:
        """Whether files are written that the checkpoint adopts: by ``fill``, or by another library."""
        return self._fill is not None or self._state.attached is not None

    def _write_extra(self) -> None:
        extra, fill = self.paths.extra, self._fill
        self._ranks.first(self.what, lambda: commit.begin(extra))
        if fill is not None:
            self._ranks.run(self.what, lambda: fill(extra))
            self._state.without = self._ranks.broadcast(self._state.without)
        if self._state.attached is not None:
            self._attached = write_attached(self._ranks, self.what, self._state.attached, extra)


def remove_unfinished(paths: SavePaths) -> None:
    """Remove the directories of a failed save. The next save tries again if a directory cannot be removed."""
    for path in (paths.temporary, paths.extra, paths.results):
        rmtree(path, ignore_errors=True)
