"""``exact_data=True`` of the callbacks: a prepared loader of hpcaccel behind another trainer's training loop.

The trainer's own DataLoader is prepared as by ``Accelerator.prepare``. Its position and the rank's random states are
saved with the trainer's checkpoints. After a resume the loader continues at this position without reading what came
before, and restores the random states right before the first batch.

A state is stored as a JSON text and tensors (``hpcaccel.checkpoint.tree``), so no pickle is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hpcaccel.checkpoint.tree import pack, unpack
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.loader import PreparedLoader, make_loader
from hpcaccel.runtime.data.loaders_in_use import LoadersInUse
from hpcaccel.runtime.data.sampling import bring_to_main
from hpcaccel.runtime.distributed import process_group, rank_env
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.training.stop_gate import StopGate

__all__ = ["TrainerLoop", "exact_loader", "from_tensors", "to_tensors"]

_TEXT = "tree"


class TrainerLoop:
    """Loop hooks of a prepared loader that another trainer iterates over.

    Args:
        step: returns the number of optimizer steps done.
        restore: sets the random generators to their states in the checkpoint; does nothing without a resume.
    """

    finishing = False
    finished_epochs_are_over = True

    def __init__(self, step: Callable[[], int], restore: Callable[[], None]) -> None:
        self._count, self._restore = step, restore
        self._begun = False

    @property
    def step(self) -> int:
        return self._count()

    def step_is_over(self) -> None:
        """Called before an iteration opens its data and before each batch. The first call restores the random states,
        for a training that resumes at the end of an epoch: then the loader does not call ``restore_rng``."""
        if not self._begun:
            self._begun = True
            self._restore()

    def restore_rng(self) -> None:
        self._restore()

    def loop_is_entered(self) -> None:
        """Do nothing: the trainer stops by itself."""

    def loop_is_left(self) -> None:
        """Do nothing: the trainer stops by itself."""


def exact_loader(
    loader: DataLoader[Any], hooks: TrainerLoop, gate: StopGate | None, device: torch.device, **options: Any
) -> PreparedLoader:
    """Prepare a trainer's DataLoader. Collective.

    Args:
        gate: the process's stop gate; None outside of a run.
        device: where the loader puts its batches.
        options: ``seedable`` and ``data_seed``, which determine the order, and options of ``PreparedLoader``.

    Raises:
        RuntimeMisuse: the dataset is iterable, or the data is already sharded.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise RuntimeMisuse(
            f"exact_data=True needs a dataset with __getitem__ and __len__, not the iterable {type(loader.dataset)}. "
            "Remove exact_data=True: the trainer then skips the samples that were used, as it does by default"
        )
    group = _ranks(gate, device)
    data_seed = options.pop("data_seed", None)
    seed = bring_to_main(loader, group, seedable=options.get("seedable", False), data_seed=data_seed)
    return make_loader(loader, group=group, in_use=LoadersInUse(), hooks=hooks, seed=seed, **options)


def _ranks(gate: StopGate | None, device: torch.device) -> RankGroup:
    group = World.current(cpu=device.type == "cpu").group if gate is None else gate.join()
    if isinstance(group, RankGroup):
        return replace(group, device=device)
    return process_group.join(rank_env.ALONE, device)


def to_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A state of a loader or of random generators as tensors by name, for a safetensors file or ``torch.save``."""
    packed = pack(state, "state")
    text = torch.frombuffer(bytearray(json.dumps(packed.tree).encode()), dtype=torch.uint8)
    return {name: tensor.contiguous() for name, tensor in packed.tensors.items()} | {_TEXT: text}


def from_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The state that was converted by ``to_tensors``.

    Raises:
        ValueError, KeyError: these are not the tensors of a state.
    """
    tree = json.loads(tensors[_TEXT].numpy().tobytes())
    state: dict[str, Any] = unpack(tree, tensors.__getitem__)
    return state
