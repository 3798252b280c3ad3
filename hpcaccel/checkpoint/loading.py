"""One checkpoint read and put into a training, and what the continuation can promise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from hpcaccel.checkpoint import manifest_writer as manifest
from hpcaccel.checkpoint.dcp_planners import read_tensors
from hpcaccel.checkpoint.dcp_storage import ShardReader
from hpcaccel.checkpoint.rank_agreement import Ranks
from hpcaccel.checkpoint.restore import Restorer
from hpcaccel.checkpoint.rng import describe_heirs, heirs
from hpcaccel.checkpoint.training_state import SHARED_TREE, TrainingState, rank_tree

__all__ = ["Guarantee", "LoadedCheckpoint", "load_all"]

Guarantee = Literal["bit-exact", "state-exact"]
"""bit-exact: goes on as if it had never stopped. state-exact: what is in the checkpoint is restored, but batches, the
order of sums, or what the script keeps itself may differ."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was restored.

    Args:
        path: the checkpoint; an older one than was asked for when that one was damaged.
        manifest: its COMMITTED manifest: ``step``, ``epoch``, ``reason``, ``world_size`` …
        per_rank: what this rank had of its own, None when the checkpoint has nothing for it (see ``rng.heirs``).
        guarantee: what this continuation can promise.
        differences: why that is no more, by what was known at the save and what has changed since.
        inherited: for each rank now the rank of then whose ``per_rank`` it has, None where it has nobody's.
    """

    path: Path
    manifest: dict[str, Any]
    per_rank: dict[str, Any] | None
    guarantee: Guarantee
    differences: tuple[str, ...]
    inherited: tuple[int | None, ...] = ()

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def epoch(self) -> int:
        return int(self.manifest["epoch"])

    @property
    def random_states(self) -> str:
        """Whose go on where, in words; empty where each rank goes on with its own."""
        return describe_heirs(self.inherited, world_size=self.manifest["world_size"])


def load_all(ranks: Ranks, path: Path, state: TrainingState) -> LoadedCheckpoint:
    """Restore ``state`` from ``path``, all ranks together; see ``CheckpointEngine.load``."""
    what = f"the checkpoint {path} cannot be loaded"
    content, index_text, tree_text = ranks.first(what, lambda: _open(path))
    index = manifest.Index.from_json(index_text)
    reader = ShardReader(path, index)
    inherited = heirs(content, world_size=ranks.world_size, tensor=state.mesh.get("tensor", 1))
    restorer: Restorer | None = None

    def targets() -> dict[str, torch.Tensor]:
        nonlocal restorer
        heir = inherited[ranks.rank]
        key = None if heir is None else rank_tree(heir)
        own = json.loads(reader.read_bytes(key)) if key is not None and key in index else None
        same_size = content["world_size"] == ranks.world_size
        restorer = Restorer(state, tree=json.loads(tree_text), own=own, own_buffers=same_size, index=index)
        return restorer.targets()

    def apply() -> dict[str, Any] | None:
        assert restorer is not None
        return restorer.apply()

    read_tensors(ranks, reader, what=what, collect=targets)
    per_rank = ranks.run(what, apply)
    differences = _differences(content, world_size=ranks.world_size, mesh=state.mesh)
    exact = content["guarantee"] == "bit-exact" and not differences
    guarantee: Guarantee = "bit-exact" if exact else "state-exact"
    return LoadedCheckpoint(path, content, per_rank, guarantee, differences, inherited)


def _open(path: Path) -> tuple[dict[str, Any], bytes, bytes]:
    """Manifest, index and shared tree of a checkpoint, checked; read once, by rank 0."""
    content = manifest.read(path)
    text = manifest.read_index(path, content)
    return content, text, ShardReader(path, manifest.Index.from_json(text)).read_bytes(SHARED_TREE)


def _differences(content: dict[str, Any], *, world_size: int, mesh: dict[str, Any]) -> tuple[str, ...]:
    """What is not as it was when the checkpoint was saved and may make sums come out otherwise."""
    if content.get("holds") == ["weights"]:
        return (f"only weights, imported from {content['imported_from']}: everything else starts anew",)
    now = {"world_size": world_size, "torch": torch.__version__, "processor": manifest.processor()}
    found = list(content.get("guarantee_reasons", ()))
    if content["guarantee"] == "bit-exact" and "guarantee_reasons" not in content:
        found.append("saved by a release that did not look where the batches came from")
    found += [f"{key}: {content[key]} then, {value} now" for key, value in now.items() if content[key] != value]
    then = content.get("mesh")
    if then and mesh and then != mesh and content["world_size"] == world_size:
        found.append(f"mesh: {_in_words(then)} then, {_in_words(mesh)} now")
    if missing := content.get("missing_rng"):
        found.append(f"no random state of rank {', '.join(map(str, missing))}, which did not take part in the save")
    return tuple(found)


def _in_words(mesh: dict[str, Any]) -> str:
    sizes = {name: size for name, size in mesh.items() if name != "strategy" and size != 1}
    return " ".join([str(mesh.get("strategy", "")), *(f"{name} {size}" for name, size in sizes.items())])
