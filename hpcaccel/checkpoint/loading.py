"""Find the checkpoint to resume from, restore training state from it, and report what the resume guarantees.

A damaged checkpoint is renamed to ``quarantined_…`` if it is in this training's own directory.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint.attached_files import check_attached
from hpcaccel.checkpoint.dcp_storage import ShardReader
from hpcaccel.checkpoint.manifest_writer import Index, processor
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.restore import Restorer
from hpcaccel.checkpoint.training_state import SHARED_TREE, TrainingState, rank_tree
from hpcaccel.checkpoint_files import manifest
from hpcaccel.core.durable_files import fsync_directory
from hpcaccel.errors import CheckpointError, Damaged
from hpcaccel.slurm.hostlist import ranks_text

__all__ = [
    "Guarantee",
    "LoadedCheckpoint",
    "describe_sources",
    "find_checkpoint",
    "load_checkpoint",
    "quarantine",
    "rank_sources",
    "replacement_of",
    "set_aside",
]

log = logging.getLogger(__name__)

Guarantee = Literal["bit-exact", "state-exact"]
"""bit-exact: the training continues as if it had never stopped. state-exact: the state shared by all ranks is restored,
but batches, random numbers, the order of summation, or state that the script keeps itself may differ."""


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
    raise CheckpointError(f"there is no such checkpoint ({directory} contains: {here})")


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
            manifest.read(path)
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
    reader = ShardReader(path, index)
    sources = rank_sources(content, world_size=ranks.world_size, mesh=state.mesh)
    restorer: Restorer | None = None

    def targets() -> dict[str, torch.Tensor]:
        nonlocal restorer
        source = sources[ranks.rank]
        key = None if source is None else rank_tree(source)
        own = json.loads(reader.read_bytes(key)) if key is not None and key in index else None
        same_size = content["world_size"] == ranks.world_size
        restorer = Restorer(state, tree=json.loads(tree_text), own=own, own_buffers=same_size, index=index)
        return restorer.targets()

    def apply() -> dict[str, Any] | None:
        assert restorer is not None
        return restorer.apply()

    _read_tensors(ranks, reader, what=what, targets=targets)
    per_rank = ranks.run(what, apply)
    if (attached := state.attached) is not None:
        ranks.run(what, lambda: attached.load(path))
    differences = _differences(content, world_size=ranks.world_size, mesh=state.mesh)
    exact = content["guarantee"] == "bit-exact" and not differences
    guarantee: Guarantee = "bit-exact" if exact else "state-exact"
    return LoadedCheckpoint(path, content, per_rank, guarantee, differences, sources)


def _open(path: Path) -> tuple[dict[str, Any], bytes, bytes]:
    """Read and verify manifest, index and shared tree of a checkpoint. Rank 0 reads them for all ranks."""
    content = manifest.read(path)
    text = manifest.read_index(path, content)
    return content, text, ShardReader(path, Index.from_json(text)).read_bytes(SHARED_TREE)


def _read_tensors(
    ranks: CheckpointRanks, reader: ShardReader, *, what: str, targets: Callable[[], dict[str, torch.Tensor]]
) -> None:
    """Read into the tensors that ``targets`` returns by key, from the files of all ranks.

    The sequence of calls is the same as in ``torch.distributed.checkpoint.load``.

    Raises:
        Damaged: on all ranks, if any of them read bytes that differ from the committed ones.
        CheckpointError: on all ranks, if anything else failed on any of them.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def plan_local() -> LoadPlan:
        planner.set_up_planner(targets(), reader.read_metadata(), ranks.is_first)
        return planner.create_local_plan()

    plan = ranks.reduce_scatter(what, plan_local, planner.create_global_plan)
    ranks.run(what, lambda: reader.read_data(planner.finish_plan(plan), planner).wait())


# -- guarantees


def _differences(content: dict[str, Any], *, world_size: int, mesh: dict[str, Any]) -> tuple[str, ...]:
    """Why a resume is not bit-exact: reasons from the save, and differences from the save that may change results."""
    if content.get("holds") == ["weights"]:
        return (f"contains only weights, imported from {content['imported_from']}: nothing else is restored",)
    now = {"world_size": world_size, "torch": torch.__version__, "processor": processor()}
    found = list(content.get("guarantee_reasons", ()))
    if content["guarantee"] == "bit-exact" and "guarantee_reasons" not in content:
        found.append("saved by an older version of hpcaccel, which did not check where the batches came from")
    found += [f"{key}: {content[key]} at the save, {value} now" for key, value in now.items() if content[key] != value]
    then = content.get("mesh")
    if then and mesh and _mesh_text(then) != _mesh_text(mesh) and content["world_size"] == world_size:
        found.append(f"mesh: {_mesh_text(then)} at the save, {_mesh_text(mesh)} now")
    if missing := content.get("missing_rng"):
        found.append(f"{ranks_text(missing)} did not take part in the save and saved no random state")
    return tuple(found)


def _mesh_text(mesh: dict[str, Any]) -> str:
    sizes = {name: size for name, size in sorted(mesh.items()) if name != "strategy" and size != 1}
    return " ".join([str(mesh.get("strategy", "")), *(f"{name} {size}" for name, size in sizes.items())])


def rank_sources(content: Mapping[str, Any], *, world_size: int, mesh: Mapping[str, Any]) -> tuple[int | None, ...]:
    """For each rank of this training, the rank whose saved per-rank state (mainly random state) it loads, or None.

    Usually, rank r loads the state of rank r. A rank that loads none seeds its generators from seed, data rank and
    step, so that two resumes from a checkpoint are identical. Ranks that work on one batch (tensor and context
    parallelism) must draw the same random numbers: if the sizes of these groups have changed since the save, all
    ranks of a group load one rank's state.

    Args:
        content: the checkpoint's manifest.
        mesh: layout of the ranks now (see ``TrainingState``).
    """
    saved, now = ([found.get(name, 1) for name in ("tensor", "context")] for found in (content.get("mesh") or {}, mesh))
    missing = content.get("missing_rng", ())
    found = (rank if saved == now else rank // prod(now) * prod(saved) for rank in range(world_size))
    return tuple(rank if rank < content["world_size"] and rank not in missing else None for rank in found)


def describe_sources(sources: Sequence[int | None], *, world_size: int) -> str:
    """The source of each rank's random state, for the log; empty if each rank continues with its own.

    Args:
        sources: see ``rank_sources``.
        world_size: the number of ranks that the checkpoint was saved with.
    """
    own = [rank for rank, source in enumerate(sources) if source == rank]
    new = [rank for rank, source in enumerate(sources) if source is None]
    left = sorted(set(range(world_size)) - set(sources))
    parts = [f"{ranks_text(own)}: own"] if own else []
    parts += [f"rank {rank}: from rank {source}" for rank, source in enumerate(sources) if source not in (None, rank)]
    if new:
        parts.append(f"{ranks_text(new)}: new (derived from seed, rank and step)")
    if left and len(sources) < world_size:
        parts.append(f"not used: those of {ranks_text(left)}")
    return "; ".join(parts) if len(own) < max(len(sources), world_size) else ""
