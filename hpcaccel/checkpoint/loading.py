"""Find the checkpoint to resume from, restore training state from it, and report what the resume guarantees.

A damaged checkpoint is renamed to ``quarantined_…`` if it is in this training's own directory.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.tensor import DTensor

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint.attached_files import check_attached
from hpcaccel.checkpoint.dcp_storage import ShardReader
from hpcaccel.checkpoint.guarantees import Guarantee, describe_sources, differences, rank_sources
from hpcaccel.checkpoint.index_parts import IndexParts
from hpcaccel.checkpoint.manifest_writer import Index
from hpcaccel.checkpoint.node_sharing import WHOLE, Offer, groups
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.restore import Restorer
from hpcaccel.checkpoint.training_state import SHARED_TREE, TrainingState, rank_tree
from hpcaccel.checkpoint_files import manifest
from hpcaccel.checkpoint_files.contents import OWN_KEYS
from hpcaccel.core.durable_files import fsync_directory
from hpcaccel.errors import CheckpointError, Damaged

__all__ = [
    "LoadedCheckpoint",
    "find_checkpoint",
    "load_checkpoint",
    "quarantine",
    "replacement_of",
    "restore",
    "set_aside",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The result of a resume.

    Args:
        path: the loaded checkpoint; not the requested one if that was damaged.
        manifest: content of its ``COMMITTED`` file: ``step``, ``epoch``, ``reason``, ``world_size`` …
        per_rank: this rank's own state; None if the checkpoint has no state for this rank (see ``rank_sources``).
        guarantee: what this resume guarantees.
        differences: why the resume is not bit-exact: reasons from the save, and what has changed since.
        sources: see ``rank_sources``.
    """

    path: Path
    manifest: dict[str, Any]
    per_rank: dict[str, Any] | None
    guarantee: Guarantee
    differences: tuple[str, ...]
    sources: tuple[int | None, ...] = ()

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def epoch(self) -> int:
        return int(self.manifest["epoch"])

    @property
    def random_states(self) -> str:
        """The source of each rank's random state as text; empty if each rank continues with its own."""
        return describe_sources(self.sources, world_size=self.manifest["world_size"])


# -- finding


def find_checkpoint(directory: Path, resume: str | Path) -> Path | None:
    """The checkpoint that ``resume`` names; see ``CheckpointEngine.find``.

    Args:
        directory: the training's own directory of checkpoints.

    Raises:
        CheckpointError: the named checkpoint does not exist, or no intact one is left; see ``newest_good``.
    """
    if resume == "auto":
        return newest_good(directory, ours=True)
    for path in (directory / resume, Path(resume).absolute()):
        for place in (path, path / "checkpoints"):
            if (place / checkpoint_files.MANIFEST).exists():
                return place
            if checkpoint_files.step_directories(place):
                return newest_good(place, ours=place == directory)
    here = ", ".join(checkpoint.name for checkpoint in checkpoint_files.committed(directory)) or "none"
    raise CheckpointError(f"there is no checkpoint {resume!r} ({directory} contains: {here})")


def newest_good(directory: Path, *, ours: bool) -> Path | None:
    """The newest checkpoint with a valid manifest and correct file sizes; None if ``directory`` contains no checkpoint,
    not even a damaged one.

    Args:
        ours: whether newer checkpoints that are damaged are quarantined; otherwise they are only skipped.

    Raises:
        CheckpointError: all are damaged (starting at step 0 would lose the training), or a newer hpcaccel wrote the
            newest undamaged one.
    """
    for _, path in checkpoint_files.step_directories(directory):
        try:
            # The files of blocks are checked by the ranks that load the checkpoint, and they fall back to another one.
            (manifest.read_head if ours else manifest.read)(path)
        except Damaged as error:
            if ours:
                quarantine(path, str(error))
            else:
                log.warning("skipped damaged checkpoint %s: %s", path, error)
        else:
            return path
    damaged = sorted(directory.glob(f"{checkpoint_files.QUARANTINED}_*"))
    damaged += [path for _, path in checkpoint_files.step_directories(directory)]
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise CheckpointError(
            f"no intact checkpoint is left in {directory}, only damaged ones: {names}. "
            "To start from step 0 anyway, move them away or set checkpoint.resume to never"
        )
    return None


def replacement_of(path: Path, error: Damaged) -> Path:
    """Quarantine the damaged checkpoint ``path``, and return the newest good one that remains in its directory.

    Args:
        error: the damage, for the log.

    Raises:
        CheckpointError: no good checkpoint remains.
    """
    if path.exists():
        quarantine(path, str(error))
    found = newest_good(path.parent, ours=True)
    if found is None:
        raise error
    return found


def quarantine(path: Path, why: str) -> None:
    """Rename a damaged checkpoint, so that it no longer counts as a checkpoint. It is kept for inspection."""
    kept = set_aside(path, checkpoint_files.QUARANTINED)
    log.warning("renamed damaged checkpoint %s to %s: %s", path.name, kept.name, why)


def set_aside(path: Path, prefix: str) -> Path:
    """Rename ``step_N`` to ``<prefix>_step_N``; if that exists, to ``<prefix>_step_N.2`` and so on."""
    target, count = path.with_name(f"{prefix}_{path.name}"), 1
    while target.exists():
        count += 1
        target = path.with_name(f"{prefix}_{path.name}.{count}")
    os.rename(path, target)
    fsync_directory(path.parent)
    return target


# -- restoring


def load_checkpoint(ranks: CheckpointRanks, path: Path, state: TrainingState) -> LoadedCheckpoint:
    """Restore ``state`` from ``path``, all ranks together; see ``CheckpointEngine.load``."""
    what = f"checkpoint {path} cannot be loaded"
    content, index_text, tree_text = ranks.first(what, lambda: _open(path))
    check_attached(ranks, what, state.attached, path, content)
    index = Index.from_json(index_text)
    parts = IndexParts(path, content, index) if "blocks" in content else None
    if parts is not None:
        ranks.run(what, partial(parts.check_files, ranks.rank, ranks.world_size))
    reader = ShardReader(path, index, parts)
    return restore(ranks, what, path, state, content=content, reader=reader, tree_text=tree_text)


def restore(
    ranks: CheckpointRanks,
    what: str,
    path: Path,
    state: TrainingState,
    *,
    content: dict[str, Any],
    reader: ShardReader,
    tree_text: bytes,
    fetch: Callable[[set[str]], None] = lambda files: None,
) -> LoadedCheckpoint:
    """Restore ``state`` from an open checkpoint, all ranks together.

    Args:
        what: the beginning of error messages.
        content: its manifest.
        tree_text: its shared tree.
        fetch: called on all ranks before they read; makes the named files available to this rank.
    """
    index = reader.index
    sources = rank_sources(content, world_size=ranks.world_size, mesh=state.mesh)
    source = sources[ranks.rank]
    if reader.parts is not None:
        ranks.run(what, partial(reader.parts.read_of_rank, source))
    fetch(set() if source is None else index.files_of(rank_tree(source)))
    restorer: Restorer | None = None

    def targets() -> dict[str, torch.Tensor]:
        nonlocal restorer
        key = None if source is None else rank_tree(source)
        own = json.loads(reader.read_bytes(key)) if key is not None and key in index else None
        same_size = content["world_size"] == ranks.world_size
        restorer = Restorer(state, tree=json.loads(tree_text), own=own, own_buffers=same_size, index=index)
        return restorer.targets()

    def apply() -> dict[str, Any] | None:
        assert restorer is not None
        return restorer.apply()

    _read_tensors(ranks, reader, what=what, targets=targets, fetch=fetch)
    per_rank = ranks.run(what, apply)
    if (attached := state.attached) is not None:
        ranks.run(what, lambda: attached.load(path))
    reasons = differences(content, world_size=ranks.world_size, mesh=state.mesh)
    exact = content["guarantee"] == "bit-exact" and not reasons
    guarantee: Guarantee = "bit-exact" if exact else "state-exact"
    return LoadedCheckpoint(path, content, per_rank, guarantee, reasons, sources)


def _open(path: Path) -> tuple[dict[str, Any], bytes, bytes]:
    """Read and verify manifest, index and shared tree of a checkpoint. Rank 0 reads them for all ranks."""
    content = manifest.read_head(path)
    text = manifest.read_index(path, content)
    return content, text, ShardReader(path, Index.from_json(text)).read_bytes(SHARED_TREE)


def _read_tensors(
    ranks: CheckpointRanks,
    reader: ShardReader,
    *,
    what: str,
    targets: Callable[[], dict[str, torch.Tensor]],
    fetch: Callable[[set[str]], None],
) -> None:
    """Read into the tensors that ``targets`` returns by key, from the files of all ranks.

    Unlike in ``torch.distributed.checkpoint.load``, the plans do not travel to rank 0, which would not change them.

    Raises:
        Damaged: on all ranks, if any of them read bytes that differ from the committed ones.
        CheckpointError: on all ranks, if anything else failed on any of them.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plan = LoadPlan([])

    def plan_local() -> Offer | None:
        nonlocal plan
        tensors = targets()
        planner.set_up_planner(tensors, reader.read_metadata(), ranks.is_first)
        plan = planner.create_local_plan()
        while reader.parts is not None and reader.parts.read_missing(tensors, plan):
            plan = planner.create_local_plan()
        plan = planner.finish_plan(plan)
        return reader.offer(
            plan,
            {
                key: str(tensor.placements) if isinstance(tensor, DTensor) else WHOLE
                for key, tensor in tensors.items()
                if not key.startswith(OWN_KEYS)
            },
        )

    reader.share(ranks.reduce_scatter(what, plan_local, groups))
    fetch({reader.index.pieces[item.storage_index].file for item in plan.items})
    ranks.run(what, lambda: reader.read_data(plan, planner).wait())
