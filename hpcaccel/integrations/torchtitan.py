"""``add_to``: agreed stops, full checkpoints and live metrics for torchtitan's ``Trainer``.

    from hpcaccel.integrations.torchtitan import add_to

    trainer = config.build()
    add_to(trainer)
    trainer.train()

Without a script of your own, start ``python -m hpcaccel.integrations.torchtitan`` instead of
``python -m torchtitan.train``; it takes the same arguments.

After each step the Trainer calls ``should_continue_training``, which reports the step to the process's stop gate
(``hpcaccel.stop_gate``). Once all ranks have agreed on a step to stop at, a full checkpoint is saved synchronously in
the Trainer's own folder, and the program exits inside ``train()``. When torchtitan is started again, it automatically
loads the checkpoint with the highest number that has a ``.metadata`` file.

A checkpoint contains the model, the optimizer, the learning rate schedule, the step and the position of the data
loader. It does not contain the ranks' random generators, so dropout differs after a resume.

Source: torchtitan 0.3.0, trainer.py and components/checkpointer/dcp.py. This module never calls
``save(last_step=True)``: ``last_save_model_only`` is True by default, and leaves out the optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchtitan import train as torchtitan_train
from torchtitan.components.checkpoint import AsyncMode
from torchtitan.distributed.utils import dist_max
from torchtitan.tools import filesystem
from torchtitan.trainer import Trainer

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import settings
from hpcaccel.runtime.script_api import log
from hpcaccel.runtime.training.stop_gate import Phase, stop_gate

__all__ = ["add_to", "add_to_every_trainer", "main"]

_watched: weakref.WeakSet[Trainer] = weakref.WeakSet()


def add_to(trainer: Trainer) -> None:
    """Let a ``Trainer`` save and stop at the same step on all ranks, and report its progress to the run.

    Call this on every rank, before ``trainer.train()``. In a sweep, a pruned trial ends at an agreed step without a
    save. Outside of a run the training is unchanged.

    Raises:
        RuntimeMisuse: with the Trainer's settings it could not continue from its own checkpoints
            (``checkpoint.enable``, ``checkpoint.load_only``, ``checkpoint.load_step``); or this process has an
            ``hpcaccel.Accelerator``.
    """
    if settings.locate(None).run is None or trainer in _watched:
        return
    _check(trainer.config.checkpoint)
    _watched.add(trainer)
    _Bridge(trainer)


def add_to_every_trainer() -> None:
    """Call ``add_to`` for each ``Trainer`` at the start of its ``train()``. Subclasses that replace ``train()`` without
    calling it are not included."""
    train = Trainer.train

    @functools.wraps(train)
    def watched(self: Trainer) -> Any:
        if self in _watched:
            return train(self)
        add_to(self)
        return self.train() if self in _watched else train(self)

    setattr(Trainer, "train", watched)  # noqa: B010


def main() -> None:
    """Run ``torchtitan.train`` with ``add_to_every_trainer``."""
    add_to_every_trainer()
    torchtitan_train.main()


def _check(checkpoint: Any) -> None:
    if not checkpoint.enable:
        raise RuntimeMisuse(
            "this Trainer saves no checkpoints, so the run could not continue after a stop. Set --checkpoint.enable"
        )
    if checkpoint.load_only:
        raise RuntimeMisuse("--checkpoint.load_only switches saving off, so the run could not continue after a stop")
    if checkpoint.load_step != -1:
        raise RuntimeMisuse(
            f"--checkpoint.load_step={checkpoint.load_step} would be loaded at each start of the run, even after a "
            "later step. Start from it with --checkpoint.initial_load_path and "
            "--checkpoint.no-initial-load-model-only, in an empty --checkpoint.folder"
        )


class _Bridge:
    """Replaces methods of one ``Trainer``, and of its checkpointer, validator and metrics processor."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # Before the first loader: workers inherit the gate's signal mask, so Slurm's SIGTERM does not end them.
        self._gate = stop_gate()
        self._reported: int | None = None
        """The last step that was reported to the gate; None before the first step."""
        self._saved: int | None = None
        """The step of the newest checkpoint of this process."""
        _replace(trainer, "train", self._train)
        _replace(trainer, "should_continue_training", self._should_continue)
        _replace(trainer.checkpointer, "dcp_save", self._dcp_save)
        _replace(trainer.metrics_processor, "log", self._log)
        _replace(trainer.metrics_processor, "log_validation", self._log_validation)
        if trainer.config.validator.enable:
            _replace(trainer.validator, "validate", self._validate)
            _replace(trainer.validator, "post_dataloading_process", self._evaluate_batch)

    # -- called in place of torchtitan's methods, which are the first argument ----------------------------------------

    def _train(self, train: Callable[[], None]) -> None:
        train()
        # Not earlier: train() catches SystemExit(0) and returns.
        if self._gate.reason == "pruned":
            self._leave()
        self._gate.phase = "finishing"

    def _should_continue(self, should_continue: Callable[[], bool]) -> bool:
        """Called before the first step, and after each step's save and evaluation."""
        goes_on, step = should_continue(), self._trainer.step
        if self._reported is None:
            self._begin(step)
        elif step != self._reported:
            if self._gate.step(step):
                return self._stop(goes_on)
            if self._gate.should_save:
                with self._during("saving"):
                    self._save()
                self._gate.saved()
        self._reported = step
        return goes_on

    def _dcp_save(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called for each save, also of weights only."""
        # An asynchronous save goes on after this call, so its time cannot be measured here.
        is_whole = self._trainer.checkpointer.async_mode == AsyncMode.DISABLED
        with self._during("saving") if is_whole else contextlib.nullcontext():
            result = save(*args, **kwargs)
        self._saved = self._trainer.step
        return result

    def _validate(self, validate: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with self._during("evaluating"):
            validate(*args, **kwargs)

    def _evaluate_batch(self, process: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._gate.sign_of_life()
        return process(*args, **kwargs)

    def _log(
        self,
        log_step: Callable[..., None],
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        log_step(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        losses = {"loss": self._of_last_stage(global_avg_loss), "max_loss": self._of_last_stage(global_max_loss)}
        log({**losses, "grad_norm": grad_norm, **(extra_metrics or {})}, step=step)

    def _log_validation(self, log_step: Callable[..., None], loss: float, step: int, *args: Any, **kwargs: Any) -> None:
        log_step(loss, step, *args, **kwargs)
        log({"validation_loss": self._of_last_stage(loss)}, step=step)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        checkpointer, config = self._trainer.checkpointer, self._trainer.config
        loaded = _path(checkpointer, step)
        if not filesystem.isdir(loaded):
            loaded = checkpointer.initial_load_path
        self._gate.begin(step, checkpoint=loaded if step else None, total_steps=config.training.steps)

    def _stop(self, goes_on: bool) -> bool:
        """Returns whether the Trainer goes on, if it does not exit."""
        gate = self._gate
        if gate.reason == "pruned":
            return False
        if not goes_on:
            gate.complete()
        elif gate.should_finish:
            self._save()
        elif gate.in_time:
            self._leave(self._save())
        else:
            self._leave()
        return False

    def _save(self) -> str:
        """Save a full checkpoint of this step, unless the Trainer has done so, and return its path."""
        checkpointer, step = self._trainer.checkpointer, self._trainer.step
        checkpointer.maybe_wait_for_saving()
        if self._saved != step:
            own = checkpointer.async_mode, checkpointer.interval
            checkpointer.async_mode, checkpointer.interval = AsyncMode.DISABLED, 1
            checkpointer.save(step)
            checkpointer.async_mode, checkpointer.interval = own
        return _path(checkpointer, step)

    def _leave(self, checkpoint: str | None = None) -> None:
        try:
            self._gate.leave(checkpoint=checkpoint)
        finally:
            self._trainer.close()  # ends the thread that deletes old checkpoints

    @contextlib.contextmanager
    def _during(self, phase: Phase) -> Iterator[None]:
        """Set the gate's phase. Not in the first step, whose phase ``gate.step`` must find unchanged."""
        if self._gate.phase != "training":
            yield
            return
        self._gate.phase = phase
        yield
        self._gate.phase = "training"

    def _of_last_stage(self, loss: float) -> float:
        """The loss on the ranks of the last pipeline stage; the others have a negative number instead."""
        dims = self._trainer.parallel_dims
        if not dims.pp_enabled:
            return loss
        return float(dist_max(torch.tensor(loss, device=self._trainer.device), dims.get_mesh("pp")))


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of one object by ``replacement``, which gets the method as its first argument."""
    setattr(owner, name, functools.partial(replacement, getattr(owner, name)))


def _path(checkpointer: Any, step: int) -> str:
    return str(filesystem.join(checkpointer.folder, f"step-{step}"))


if __name__ == "__main__":
    main()
