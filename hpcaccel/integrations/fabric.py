"""``add_stop_gate``: agreed stops and live metrics for scripts that keep Lightning's ``Fabric``.

    from hpcaccel.integrations.fabric import add_stop_gate, newest_checkpoint

    state = {"model": model, "optimizer": optimizer, "step": 0}      # after fabric.setup()
    add_stop_gate(fabric, args.output_dir, state)
    if (path := newest_checkpoint(args.output_dir)) is not None:
        fabric.load(path, state)

When the script takes the next batch from a loader of ``fabric.setup_dataloaders``, the previous optimizer step is
over. This step is then reported to the process's stop gate (``hpcaccel.stop_gate``). Once all ranks have agreed on a
step to stop at, ``fabric.save(path, state)`` saves it, and the program exits.

``fabric.save`` adds the number of optimizer steps to the checkpoint, and ``fabric.load`` reads it.

Source: lightning 2.6.6. Works with both packages, ``lightning.fabric`` and ``lightning_fabric``.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hpcaccel.checkpoint_files.watched import is_whole
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.integrations import StepsBetweenBatches
from hpcaccel.runtime import settings
from hpcaccel.runtime.rank_logger import TRAINING_LOG

__all__ = ["add_stop_gate", "newest_checkpoint", "refuse_lone_copies"]

logger = logging.getLogger(TRAINING_LOG)

STEP_KEY = "hpcaccel_step"
"""Key in a checkpoint of Fabric: the number of optimizer steps."""
SHARDED_MARKS = ("meta.pt", "latest")
"""Files of checkpoint directories, written last: by FSDP and model-parallel strategies, and by DeepSpeed."""

_hook: _FabricSteps | None = None


def newest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Path of the checkpoint below ``directory`` that was completed last, by hpcaccel's bridges or by Lightning itself;
    None if there is no complete checkpoint. Pass it to ``Trainer.fit(ckpt_path=…)`` or ``fabric.load``."""
    found = []
    for path in Path(directory).glob("**/*.ckpt"):
        try:
            if _is_complete(path):
                found.append((path.stat().st_mtime, path))
        except OSError:
            continue  # deleted in the meantime, or a link to a deleted file
    return str(max(found)[1]) if found else None


def _is_complete(path: Path) -> bool:
    if path.is_dir():
        return any((path / mark).is_file() for mark in SHARDED_MARKS)
    return is_whole(path)


def refuse_lone_copies(world_size: int, kind: str) -> None:
    """Check that the trainer has the run's number of ranks.

    Args:
        kind: the trainer's class, for the message.

    Raises:
        RuntimeMisuse: the numbers differ.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != ranks:
        nodes = max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
        raise RuntimeMisuse(
            f"this {kind} trains with {world_size} rank(s), but the run has {ranks}. "
            f"Create it with {kind}(num_nodes={nodes}, devices={ranks // nodes}, strategy=…)"
        )


def add_stop_gate(
    fabric: Any,
    output_dir: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    name: str = "hpcaccel-step={step}.ckpt",
    total_steps: int | None = None,
    save: Callable[[str], Any] | None = None,
) -> None:
    """Make a script save and stop at the same step on all ranks. Call it once on every rank, after ``fabric.setup`` and
    before the training loop.

    The steps of every optimizer count, but at most one between two batches. ``fabric.log`` and
    ``fabric.log_dict`` record numbers as metrics of the run, too. If the training is to end for good (``hpcaccel stop
    --finish``), the training loaders return no more batches, so that the code behind the loop runs; a pruned trial
    exits. Outside of a run, ``fabric.save`` only adds the number of steps.

    Args:
        fabric: a ``lightning.fabric.Fabric``.
        output_dir: where to save at a stop; the same on all ranks and nodes.
        state: what ``fabric.save`` writes at a stop. The script updates it, for example its step, before it takes the
            next batch.
        name: name of the checkpoint; ``{step}`` is the number of optimizer steps. ``newest_checkpoint`` finds names
            that end in ``.ckpt``.
        total_steps: number of optimizer steps of the whole training, for the remaining time in ``hpcaccel status``.
        save: called on all ranks with the path, instead of ``fabric.save(path, state)``.

    Raises:
        RuntimeMisuse: Fabric's number of ranks differs from the run's, or this process already has a gate.
    """
    global _hook
    if _hook is not None:
        raise RuntimeMisuse("add_stop_gate(): this process already has a stop gate. Call it once, for one Fabric")
    if settings.locate(None).run is not None:
        refuse_lone_copies(fabric.world_size, "Fabric")
    _hook = _FabricSteps(fabric, output_dir, name, total_steps, save or (lambda path: fabric.save(path, state)))
    for package in ("lightning.fabric", "lightning_fabric"):
        if (wrappers := sys.modules.get(f"{package}.wrappers")) is not None:
            loader = wrappers._FabricDataLoader
            loader.__iter__ = _watched(loader.__iter__)


class _FabricSteps(StepsBetweenBatches):
    """Counts the optimizer steps of one Fabric. Replaces its ``save``, ``load`` and ``log_dict``, and the method of its
    strategy that all its optimizers call."""

    def __init__(
        self,
        fabric: Any,
        output_dir: str | os.PathLike[str],
        name: str,
        total_steps: int | None,
        save: Callable[[str], Any],
    ) -> None:
        super().__init__(output_dir, name, total_steps)
        self._save, self._save_state, self._load, self._log_dict = save, fabric.save, fabric.load, fabric.log_dict
        self._optimizer_step = fabric.strategy.optimizer_step
        fabric.__dict__.update(save=self.save_state, load=self.load, log_dict=self.log_dict)
        fabric.strategy.__dict__["optimizer_step"] = self.optimizer_step

    def save(self, path: str) -> None:
        self._save(path)

    def save_state(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self.gate is not None:
            self.gate.phase = "saving"
        self._save_state(path, {**state, STEP_KEY: self.done}, *args, **kwargs)
        if self.gate is not None:
            self.gate.phase = "training"

    def load(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        found = self._load(path, *args, **kwargs)
        step = found.pop(STEP_KEY, None)
        if step is None:
            logger.warning("%s has no %s: its optimizer steps count from 0", path, STEP_KEY)
        else:
            self.loaded(int(step), str(path))
        return found

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        plain = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}
        self.report(plain, step)
        self._log_dict(metrics, step)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = self._optimizer_step(*args, **kwargs)
        self.note_step()
        return result


def _watched(iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(iterate)
    def watched(self: Any) -> Iterator[Any]:
        return iterate(self) if _hook is None else _hook.watch(iterate(self), self.dataset)

    return watched
