"""The runtime's checkpoints: which state is saved, into which directory, and with which guarantee.

``CheckpointManager`` builds the ``TrainingState`` from the prepared objects, runs the script's hooks and calls
``hpcaccel.checkpoint.CheckpointEngine``. ``hpcaccel.checkpoint.commit`` describes how a save is written and committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccel.core.durable_files import append_line, make_folder
from hpcaccel.runtime.checkpointing.prepared_objects import PreparedObjects
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.settings import OutputLocation, Settings

if TYPE_CHECKING:
    # These imports take half a second; a program needs them only at its first save or load.
    from hpcaccel.checkpoint import CheckpointEngine, LoadedCheckpoint
    from hpcaccel.checkpoint.background import Progress
    from hpcaccel.checkpoint.training_state import Stateful
    from hpcaccel.core.rank_records import Save
    from hpcaccel.runtime.checkpointing.snapshot_manager import SnapshotManager

__all__ = ["CheckpointManager"]


class CheckpointManager:
    """Saves and loads all prepared objects and the loop's counters. All ranks save and load together.

    Args:
        place: names the directory of the run's checkpoints. If there is none, every ``save`` needs a ``directory``.
    """

    def __init__(self, place: OutputLocation, group: RankGroup, settings: Settings, prepared: PreparedObjects) -> None:
        self.directory: Path | None = place.checkpoints
        self._run = place.run
        self._attempt = place.attempt
        self._group = group
        self._settings = settings
        self._prepared = prepared
        self._run_engine: CheckpointEngine | None = None
        """The engine of ``directory``, created at first use."""

    @property
    def has_place(self) -> bool:
        """Whether there is a directory for the run's checkpoints."""
        return self.directory is not None

    @property
    def in_flight(self) -> bool:
        """Whether a background save is not settled yet. Must be cheap, because the loop reads it at every step."""
        engine = self._run_engine
        return engine is not None and engine.background.pending is not None

    # -- saving

    def save(
        self,
        counters: Stateful,
        *,
        step: int,
        epoch: int,
        reason: str,
        doubts: Sequence[str],
        directory: Path | None = None,
        missing: Sequence[int] = (),
        background: bool = False,
        spread_seconds: float = 0.0,
    ) -> Path:
        """Save the training state. Before a save into the run's checkpoints, wait for a background save in flight.

        Args:
            doubts: reasons why the checkpoint is not bit-exact; empty if it is.
            directory: where to save; None means the run's checkpoints. The script's save hooks are called with this
                directory; if it is None, with an empty directory whose files become part of the checkpoint.
            missing: ranks that do not take part. If there are any, only rank 0 calls ``save``.
            background: whether to return once a snapshot is taken (see ``in_flight``). If there are save hooks,
                missing ranks or DeepSpeed's engine, or too little memory for the snapshot, the call returns after the
                commit anyway.
            spread_seconds: the time over which a background save spreads its writes, unless somebody waits for it; see
                ``hpcaccel.checkpoint.write_pace``.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: on all ranks that take part, if this save or the awaited background save failed on any of
                them. An error in the background is raised by ``settle``, ``drain`` or the next ``save``.
        """
        from hpcaccel.checkpoint import capture_rng

        state = self._prepared.as_state(counters, {"rng": capture_rng(self._group.device)})
        if state.attached is not None:
            doubts = [*doubts, "weights and optimizer are saved and restored by DeepSpeed's engine"]

        def run_hooks(extra: Path) -> None:
            target = directory or extra
            make_folder(target)
            state.without = self._prepared.run_save_hooks(str(target))

        engine = self._engine_of(directory)
        engine.background.spread_seconds = spread_seconds
        return engine.save(
            state,
            step=step,
            epoch=epoch,
            reason=reason,
            guarantee="state-exact" if doubts or missing else "bit-exact",
            guarantee_reasons=doubts,
            missing=missing,
            fill=run_hooks if self._prepared.save_hooks else None,
            background=background,
        )

    def commit_snapshot(self, snapshots: SnapshotManager, reason: str, *, deadline: float | None) -> int | None:
        """Commit the newest snapshot in memory as one of the run's checkpoints; see
        ``CheckpointEngine.commit_snapshot``."""
        return snapshots.commit(self._engine_of(None), reason, deadline=deadline)

    def progress(self) -> Progress:
        """Progress of the background save on this rank."""
        assert self._run_engine is not None
        return self._run_engine.progress()

    def hurry(self) -> None:
        """Let a background save in flight, if there is one, continue at full speed. Not collective."""
        if self._run_engine is not None:
            self._run_engine.background.hurry()

    def settle(self, *, failed: bool) -> None:
        """Finish the background save, after all ranks have seen that it has ended; see ``CheckpointEngine.settle``."""
        assert self._run_engine is not None
        self._run_engine.settle(failed=failed)

    def drain(self) -> None:
        """Wait for the background save, if there is one.

        Raises:
            CheckpointError: on all ranks, if the save failed on any rank.
        """
        if self._run_engine is not None:
            self._run_engine.drain()

    def close(self) -> None:
        """Stop background work. This rank makes no further saves."""
        if self._run_engine is not None:
            self._run_engine.close()

    # -- finding and loading

    def find(self) -> Path | None:
        """The checkpoint to start from, the same on all ranks; None if the training starts at step 0.

        If ``checkpoint.resume`` names a checkpoint, it is used only until the run has a checkpoint of its own.

        Raises:
            CheckpointError: on all ranks, for the reasons that ``CheckpointEngine.find`` lists.
        """
        resume = self._settings.resume
        if self.directory is None or resume == "never":
            return None
        engine = self._engine_of(None)
        own = engine.find("auto")
        return own if own is not None or resume == "auto" else engine.find(resume)

    def find_in(self, directory: Path) -> Path | None:
        """``directory`` if it is a checkpoint, else the newest undamaged checkpoint in it.

        Raises:
            CheckpointError: on all ranks, if there is no such checkpoint.
        """
        return self._engine_of(directory).find(directory)

    def has_made(self, path: Path) -> bool:
        """Whether this training has saved or loaded the run's checkpoint ``path``. All ranks get rank 0's result."""
        return bool(self._group.from_main(self._engine_of(path.parent).has_made(path)))

    def load(
        self, path: Path, counters: Stateful, *, given: Path | None = None, fall_back: bool = True
    ) -> LoadedCheckpoint:
        """Restore all prepared objects and ``counters`` from a checkpoint.

        Args:
            given: the directory that the script passed. The script's load hooks are called with this directory if the
                save hooks wrote there, else with ``path``.
            fall_back: whether to load the newest good checkpoint in the same directory if ``path`` is damaged.

        Raises:
            CheckpointError: on all ranks, if the checkpoint is damaged or belongs to another model, or a load hook
                fails.
        """
        state = self._prepared.as_state(counters, {})
        state.without = self._run_load_hooks(path, given)
        loaded = self._engine_of(path.parent).load(path, state, fall_back=fall_back)
        if loaded.path != path:
            # Another checkpoint was loaded because ``path`` is damaged: the hooks must read the loaded one.
            self._run_load_hooks(loaded.path, given)
        if self._settings.deterministic or loaded.guarantee == "state-exact":
            return loaded
        return replace(loaded, guarantee="state-exact", differences=("runtime.deterministic is now off",))

    def _run_load_hooks(self, path: Path, given: Path | None) -> frozenset[int]:
        from hpcaccel.checkpoint import commit
        from hpcaccel.checkpoint.rank_agreement import CheckpointRanks

        if not self._prepared.load_hooks:
            return frozenset()
        # Save hooks wrote into the checkpoint, or into the directory that the script passed.
        directory = given if given is not None and not commit.has_adopted(path) else path
        ranks = CheckpointRanks.of(self._group)
        return ranks.run(
            f"the script's load hooks failed for {directory}",
            lambda: self._prepared.run_load_hooks(str(directory)),
        )

    # -- random states

    def random_state(self, loaded: LoadedCheckpoint) -> dict[str, Any]:
        """The random state with which this rank continues: the state that the checkpoint contains for this rank.

        Generators without a saved state get a seed derived from the training's seed, the data rank and the step. This
        call also seeds the global generators.
        """
        from hpcaccel.checkpoint.training_state import fresh_rng
        from hpcaccel.runtime.rng.determinism import mix

        own = (loaded.per_rank or {}).get("rng") or {}
        seed = mix(self._settings.seed or 0, self._group.data_rank, loaded.step)
        return {**fresh_rng(seed, self._group.device), **own}

    def restore_rng(self, rng: Any) -> None:
        """Set this rank's generators to a state from ``random_state``."""
        from hpcaccel.checkpoint import restore_rng

        restore_rng(rng, self._group.device)

    # -- engines

    def _engine_of(self, directory: Path | None) -> CheckpointEngine:
        """The engine of ``directory``; None means the run's checkpoints."""
        if directory is not None and (self.directory is None or directory != self.directory.absolute()):
            return self._make_engine(directory, keep=None)
        if self._run_engine is None:
            assert self.directory is not None, "the caller has checked that there is a place to save"
            self._run_engine = self._make_engine(self.directory, keep=self._settings.keep)
        return self._run_engine

    def _make_engine(self, directory: Path, *, keep: int | None) -> CheckpointEngine:
        from hpcaccel.checkpoint import CheckpointEngine

        return CheckpointEngine(
            directory,
            rank=self._group.rank,
            world_size=self._group.world_size,
            group=self._group.control,
            attempt=self._attempt,
            keep=keep,
            keep_every=self._settings.keep_every_steps,
            local_world_size=self._group.env.local_world_size,
            on_saved=self._record_save,
        )

    def _record_save(self, save: Save) -> None:
        """Append a committed save to the attempt's ``saves.jsonl``. Outside a run, do nothing."""
        if self._run is None:
            return
        from hpcaccel.core.records import to_dict

        path = self._run.saves(self._attempt)
        make_folder(path.parent)
        append_line(path, to_dict(save))
