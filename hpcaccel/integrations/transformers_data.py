"""``HpcaccelCallback(exact_data=True)``: a prepared loader behind ``transformers.Trainer``'s training loop.

Source: transformers 5.23, trainer.py. ``_inner_training_loop`` calls ``get_train_dataloader``. After a resume it calls
``skip_first_batches``, which reads and discards what was used, and sets the random generators (``_load_rng_state``)
only after it has read the first batches: a dataset that draws random numbers gets different numbers than in an
uninterrupted training.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch.utils.data import DataLoader
from transformers import Trainer, trainer

from hpcaccel.integrations.exact_data import TrainerLoop, exact_loader, from_tensors, to_tensors
from hpcaccel.runtime.data.loader import PreparedLoader
from hpcaccel.runtime.rank_logger import TRAINING_LOG
from hpcaccel.runtime.training.stop_gate import StopGate

__all__ = ["ExactTraining", "read_position"]

logger = logging.getLogger(TRAINING_LOG)

POSITION_FILE = "hpcaccel_loader.safetensors"
"""File of a checkpoint: the loader's position, the same for all ranks."""


class ExactTraining:
    """Context manager for one call of ``Trainer._inner_training_loop``: replaces methods of this Trainer.

    Args:
        gate: the process's stop gate; None outside of a run.
        checkpoint: the checkpoint from which the training resumes; None if it starts from scratch.
    """

    def __init__(self, owner: Trainer, gate: StopGate | None, checkpoint: str | None) -> None:
        self._owner, self._gate, self._checkpoint = owner, gate, checkpoint
        self._position = None if checkpoint is None else read_position(checkpoint)
        self._loader: PreparedLoader | None = None
        self._load_rng = owner._load_rng_state
        self._save_rng = owner._save_rng_state
        self._get_loader = owner.get_train_dataloader

    def __enter__(self) -> ExactTraining:
        replaced = {"get_train_dataloader": self._prepared, "_save_rng_state": self._save}
        if self._position is not None:
            replaced["_load_rng_state"] = self._leave_rng_to_the_loader
        self._owner.__dict__.update(replaced)
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("get_train_dataloader", "_save_rng_state", "_load_rng_state"):
            self._owner.__dict__.pop(name, None)

    def _prepared(self) -> DataLoader[Any]:
        """The Trainer's own DataLoader, prepared by hpcaccel instead of by accelerate."""
        owner, accelerator = self._owner, self._owner.accelerator
        accelerator.__dict__["prepare"] = lambda loader, **_: loader
        try:
            loader = self._get_loader()
        finally:
            del accelerator.__dict__["prepare"]
        hooks = TrainerLoop(lambda: int(owner.state.global_step), self._restore_rng)
        self._loader = prepared = exact_loader(
            loader,
            hooks,
            self._gate,
            owner.args.device,
            seedable=accelerator.use_seedable_sampler,
            data_seed=owner.args.data_seed,
            even_batches=accelerator.even_batches,
            split_batches=accelerator.split_batches,
            non_blocking=accelerator.non_blocking,
        )
        if self._position is not None:
            prepared.load_state_dict(self._position)
            for change in prepared.changes:
                logger.warning("the samples after this resume are not those of an uninterrupted run: %s", change)
        return prepared

    def _restore_rng(self) -> None:
        if self._position is not None:
            self._load_rng(self._checkpoint)

    def _leave_rng_to_the_loader(self, checkpoint: str | None) -> None:
        """Do nothing: the loader restores the generators right before its first batch."""

    def _save(self, output_dir: str) -> None:
        """Save this rank's generators, and on rank 0 the loader's position. The Trainer writes its mark of a complete
        checkpoint after this."""
        self._save_rng(output_dir)
        if self._loader is not None and self._owner.args.should_save:
            safetensors.torch.save_file(to_tensors(self._loader.state_dict()), Path(output_dir) / POSITION_FILE)


def read_position(checkpoint: str) -> dict[str, Any] | None:
    """The position of the data in a checkpoint; None, with a warning, if the checkpoint has none."""
    try:
        return from_tensors(safetensors.torch.load_file(Path(checkpoint) / POSITION_FILE))
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        logger.warning(
            "%s has no readable position of the data (%s): it was saved without exact_data=True, or the file is "
            "damaged. The batches that were used are skipped, and this resume may not be exact",
            checkpoint,
            error,
        )
        return None


_skip_first_batches: Any = getattr(trainer, "skip_first_batches")  # noqa: B009


@functools.wraps(_skip_first_batches)
def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """``accelerate.skip_first_batches``, also for prepared loaders. With a saved position such a loader starts there;
    without one it starts ``num_batches`` batches after the beginning of the epoch. It does not read what it skips."""
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    return _skip_first_batches(dataloader, num_batches)


setattr(trainer, "skip_first_batches", skip_first_batches)  # noqa: B010
