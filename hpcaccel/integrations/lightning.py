"""``HpcaccelCallback``: agreed stops and live metrics for ``lightning.Trainer``.

    from hpcaccel.integrations.lightning import HpcaccelCallback, newest_checkpoint

    trainer = Trainer(num_nodes=2, devices=4, callbacks=[HpcaccelCallback()])
    trainer.fit(model, data, ckpt_path=newest_checkpoint(trainer.default_root_dir))

The callback reports each optimizer step to the process's stop gate (``hpcaccel.stop_gate``). Once all ranks have agreed
on a step to stop at, it saves ``hpcaccel-step=N.ckpt`` in ``default_root_dir`` and exits.

hpcaccel's launcher sets TORCHELASTIC_RUN_ID, so that Lightning takes the ranks from torchrun's variables. If Lightning
took them from srun's, it would install handlers that save inside a signal handler and requeue the job themselves.

Source: lightning 2.6.6. Works with both of its packages, ``lightning.pytorch`` and ``pytorch_lightning``.
"""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hpcaccel.checkpoint.training_state import capture_rng, restore_rng
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.integrations.exact_data import TrainerLoop, exact_loader, from_tensors, to_tensors
from hpcaccel.integrations.fabric import newest_checkpoint, refuse_lone_copies
from hpcaccel.runtime import settings
from hpcaccel.runtime.rank_logger import TRAINING_LOG
from hpcaccel.runtime.script_api import log
from hpcaccel.runtime.training.stop_gate import StopGate, stop_gate

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback

__all__ = ["HpcaccelCallback", "newest_checkpoint"]

logger = logging.getLogger(TRAINING_LOG)

RNG_KEY = "hpcaccel_rng"
"""Key in a checkpoint: the random states of all ranks."""
_PREPARE = "_prepare_dataloader"


class HpcaccelCallback(Callback):
    """Saves and stops a ``Trainer`` at the same step on all ranks, and reports the training's progress to the run.

    In a sweep, a pruned trial ends at an agreed step without a save. Outside of a run, only ``exact_data`` has an
    effect.

    Args:
        exact_data: read the training data with a prepared loader of hpcaccel, in place of Lightning's
            DistributedSampler. Its position and the random generators of all ranks are saved with each checkpoint, so
            that a resume within an epoch continues with the samples and random numbers of an uninterrupted training.
            Needs a map-style dataset and whole epochs.

    Raises:
        RuntimeMisuse: at the start of ``fit``: the Trainer's number of ranks differs from the run's. With the Trainer's
            default settings each rank would train alone. Or ``exact_data`` is impossible.
    """

    def __init__(self, *, exact_data: bool = False) -> None:
        self.exact_data = exact_data
        self._gate: StopGate | None = None
        self._step = 0
        self._rng: dict[str, torch.Tensor] | None = None
        """This rank's random states in the loaded checkpoint."""
        self._device = torch.device("cpu")

    # -- called by the Trainer ------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if settings.locate(None).run is not None:
            refuse_lone_copies(trainer.world_size, "Trainer")
            # Before the first loader: workers inherit the gate's signal mask, so Slurm's SIGTERM does not end them.
            self._gate = stop_gate()
        if self.exact_data:
            self._use_prepared_loader(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called on all ranks. Only rank 0's checkpoint is written, so it gets the random states of all."""
        if self.exact_data:
            states = [to_tensors(capture_rng(trainer.strategy.root_device))]
            if trainer.world_size > 1:
                (own,), states = states, [{}] * trainer.world_size
                dist.all_gather_object(states, own)
            checkpoint[RNG_KEY] = states

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self.exact_data:
            return
        states = checkpoint.get(RNG_KEY, [])
        self._rng = states[trainer.global_rank] if trainer.global_rank < len(states) else None
        if self._rng is None:
            logger.warning(
                "the checkpoint has no random states for rank %d: it was saved without exact_data=True or by fewer "
                "ranks, so this resume may not be exact",
                trainer.global_rank,
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer._data_connector.__dict__.pop(_PREPARE, None)
        self._rng = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gate = self._gate
        if gate is None:
            return  # a test or a validation alone
        self._step = trainer.global_step
        total = trainer.estimated_stepping_batches
        gate.begin(
            self._step,
            checkpoint=trainer.ckpt_path if self._step else None,
            total_steps=int(total) if 0 < total < math.inf else None,
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        gate, step = self._gate, trainer.global_step
        if gate is None or step == self._step:
            return  # between two optimizer steps
        self._step = step
        if step % max(1, getattr(trainer, "log_every_n_steps", 1)) == 0:
            self._log(trainer)
        if gate.step(step):
            self._stop(gate, trainer)
        elif gate.should_save:
            gate.phase = "saving"
            trainer.save_checkpoint(self._checkpoint(trainer))
            gate.phase = "training"
            gate.saved()

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        if self._gate is not None:
            self._gate.phase = "evaluating"
            self._gate.sign_of_life()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._gate is not None:
            self._gate.phase = "training"
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.phase = "finishing"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _use_prepared_loader(self, trainer: Trainer) -> None:
        """Replace the method with which the Trainer adds a DistributedSampler to its loaders."""
        options: Any = trainer
        if options.reload_dataloaders_every_n_epochs or options.limit_train_batches != 1.0 or options.overfit_batches:
            raise RuntimeMisuse(
                "exact_data=True needs whole epochs of one loader. Remove reload_dataloaders_every_n_epochs, "
                "limit_train_batches and overfit_batches from the Trainer, or exact_data=True from HpcaccelCallback"
            )
        self._device = device = trainer.strategy.root_device
        prepare = getattr(trainer._data_connector, _PREPARE)

        def prepare_dataloader(dataloader: Any, shuffle: bool, mode: Any) -> Any:
            if mode != "train" or not isinstance(dataloader, DataLoader):
                return prepare(dataloader, shuffle=shuffle, mode=mode)
            hooks = TrainerLoop(lambda: trainer.global_step, self._restore_rng)
            # The Trainer itself moves each batch to the device, between two hooks of the LightningModule.
            return exact_loader(dataloader, hooks, self._gate, device, put_on_device=False)

        trainer._data_connector.__dict__[_PREPARE] = prepare_dataloader

    def _restore_rng(self) -> None:
        if self._rng is not None:
            restore_rng(from_tensors(self._rng), self._device)

    def _stop(self, gate: StopGate, trainer: Trainer) -> None:
        if gate.reason == "pruned":
            gate.leave()
        if self._step == trainer.max_steps:
            gate.complete()
        if gate.should_finish or self._step == trainer.max_steps:
            trainer.should_stop = True
            return
        if not gate.in_time:
            gate.leave()
        path = self._checkpoint(trainer)
        trainer.save_checkpoint(path)
        gate.leave(checkpoint=path)

    def _checkpoint(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) / f"hpcaccel-step={self._step}.ckpt"

    def _log(self, trainer: Trainer) -> None:
        values = {name: value.item() for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        if values:
            log(values, step=trainer.global_step)
