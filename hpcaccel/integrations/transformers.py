"""``HpcaccelCallback``: agreed stops, exact steps and live metrics for ``transformers.Trainer``.

    from hpcaccel.integrations.transformers import HpcaccelCallback, newest_checkpoint

    trainer = Trainer(..., callbacks=[HpcaccelCallback()])
    trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))

With ``runtime.bridge: transformers`` in the spec, ``add_to_every_trainer`` adds the callback and the resume without a
change to the script.

The callback reports each step to the process's stop gate (``hpcaccel.stop_gate``). Once all ranks have agreed on a step
to stop at, it lets the Trainer save a checkpoint, and exits in ``on_save``: the code that follows in ``train()`` and
after it (``load_best_model_at_end``, ``save_model``, ``push_to_hub``) would use a model that is not fully trained.

Source: transformers 5.23, trainer.py: ``_save_checkpoint`` writes ``trainer_state.json`` last, and
``get_last_checkpoint`` takes the checkpoint with the highest number, whether or not it has this file. This module
replaces ``get_last_checkpoint`` by ``newest_checkpoint``, which skips checkpoints without the file.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import transformers
from transformers import trainer, trainer_utils

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.run_ledger import RunLedger
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import settings
from hpcaccel.runtime.rank_logger import TRAINING_LOG
from hpcaccel.runtime.script_api import log
from hpcaccel.runtime.training.stop_gate import StopGate, stop_gate

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["HpcaccelCallback", "add_to_every_trainer", "newest_checkpoint"]

logger = logging.getLogger(TRAINING_LOG)

STATE_FILE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Path of the checkpoint in ``output_dir`` that was completed last; None if there is none. Checkpoints without a
    readable ``trainer_state.json`` do not count."""
    return _newest(output_dir, since=0.0)


def _newest(output_dir: str | os.PathLike[str], *, since: float) -> str | None:
    """The checkpoint that was completed last, but not before ``since`` (seconds since the epoch); None without one."""
    found = [
        (completed, int(match[1]), path)
        for path in _children(output_dir)
        if (match := _NAME.fullmatch(path.name)) and (completed := _completed(path)) is not None and completed >= since
    ]
    return str(max(found)[2]) if found else None


def _completed(path: Path) -> float | None:
    """When a checkpoint was completed (seconds since the epoch); None if it is not complete."""
    state = path / STATE_FILE
    try:
        json.loads(state.read_bytes())["global_step"]
        return state.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _children(folder: str | os.PathLike[str]) -> list[Path]:
    try:
        return list(Path(folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


# ``Trainer.train(resume_from_checkpoint=True)`` looks this function up in both modules, and scripts import it.
for _module in (trainer, trainer_utils):
    setattr(_module, "get_last_checkpoint", newest_checkpoint)  # noqa: B010


class HpcaccelCallback(transformers.TrainerCallback):
    """Saves and stops a ``Trainer`` at the same step on all ranks, and reports the training's progress to the run.

    In a sweep, a pruned trial ends at an agreed step without a save. Outside of a run, only ``exact_data`` has an
    effect.

    Args:
        exact_data: read the training data with a prepared loader of hpcaccel, whose position is saved with each
            checkpoint. A resume then reads the samples, and draws the random numbers, of an uninterrupted training,
            even if the dataset draws random numbers itself; and it does not read what it skips. The order of the
            samples may differ from the order without it. Needs a map-style dataset.

    Raises:
        RuntimeMisuse: when the Trainer is created, if it has ``enable_jit_checkpoint``, with which each rank decides by
            its own timer when to save; when the training begins, if the process has an ``hpcaccel.Accelerator``, or
            with ``exact_data``, if the dataset is iterable.
    """

    _in_charge: tuple[HpcaccelCallback, Any] | None = None
    """The callback that acts, and its Trainer's state. Another one of the same Trainer, as after ``runtime.bridge`` and
    a line in the script, does nothing."""

    def __init__(self, *, exact_data: bool = False) -> None:
        self.exact_data = exact_data
        self._gate: StopGate | None = None
        """None outside of ``train()`` and of a run, and in a callback that is not in charge."""
        self._stopping = False

    # -- called by the Trainer ------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        _refuse_jit(args)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        _refuse_jit(args)
        other = HpcaccelCallback._in_charge
        if settings.locate(None).run is None or (other is not None and other[0] is not self and other[1] is state):
            return
        HpcaccelCallback._in_charge = (self, state)
        if args.save_only_model:
            logger.warning("save_only_model is switched off: a run cannot continue without the optimizer's state")
            args.save_only_model = False
        self._stopping = False
        self._gate = gate = stop_gate()
        path = _checkpoint(args, state)
        resumed = str(path) if state.global_step and path.exists() else None
        gate.begin(state.global_step, checkpoint=resumed, total_steps=state.max_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._gate is None:
            return
        if self._gate.step(state.global_step):
            self._stop(self._gate, state, control)
        else:
            control.should_save = control.should_save or self._gate.should_save
            self._before_save(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._stopping:
            self._before_save(control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._gate is None:
            return
        if self._stopping:
            self._gate.leave(checkpoint=_checkpoint(args, state))
        self._gate.phase = "training"
        self._gate.saved()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._gate is not None:
            self._gate.phase = "evaluating"
            self._gate.sign_of_life()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._gate is not None:
            self._gate.phase = "saving" if control.should_save else "training"

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if self._gate is None:
            return
        values = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        if values:
            log(values, step=state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        gate, self._gate, HpcaccelCallback._in_charge = self._gate, None, None
        if gate is None:
            return
        if self._stopping:
            gate.leave()  # another callback has prevented the save
        gate.phase = "finishing"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _before_save(self, control: TrainerControl) -> None:
        """Begin to measure the save that the Trainer makes next. After an evaluation, ``on_evaluate`` does it."""
        if self._gate is not None and control.should_save and not control.should_evaluate:
            self._gate.phase = "saving"

    def _stop(self, gate: StopGate, state: TrainerState, control: TrainerControl) -> None:
        """Let the Trainer save and stop. It saves after this call, and then calls ``on_save``."""
        if gate.reason == "pruned":
            gate.leave()
        control.should_training_stop = control.should_save = True
        if state.global_step >= state.max_steps:
            gate.complete()
        if gate.should_finish or state.global_step >= state.max_steps:
            return  # the Trainer ends by itself
        if not gate.in_time:
            logger.warning(
                "no time is left to save at step %d: the run resumes from the newest checkpoint", state.global_step
            )
            gate.leave()
        self._stopping = True
        control.should_evaluate = False  # it might take longer than the time that is left


def _refuse_jit(args: TrainingArguments) -> None:
    if getattr(args, "enable_jit_checkpoint", False):
        raise RuntimeMisuse(
            "TrainingArguments(enable_jit_checkpoint=True) and HpcaccelCallback both save when the job is stopped. "
            "Remove enable_jit_checkpoint: it decides on each rank alone, so ranks may save different steps"
        )


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The path of the Trainer's checkpoint for the current step."""
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def add_to_every_trainer() -> None:
    """Add an ``HpcaccelCallback`` to every Trainer created from now on, and make ``train()`` resume automatically.

    ``train()`` without ``resume_from_checkpoint`` then starts from the newest complete checkpoint in ``output_dir``, if
    an earlier attempt of this run has written it.
    """
    callbacks = cast("list[Any]", trainer.DEFAULT_CALLBACKS)
    if HpcaccelCallback in callbacks:
        return
    callbacks.append(HpcaccelCallback)
    train = trainer.Trainer.train

    @functools.wraps(train)
    def resuming(
        self: transformers.Trainer, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if resume_from_checkpoint is None:
            resume_from_checkpoint = _checkpoint_of_this_run(str(self.args.output_dir))
        return train(self, resume_from_checkpoint, *args, **kwargs)

    setattr(trainer.Trainer, "train", resuming)  # noqa: B010


def _train_with_exact_data(train: Any) -> Any:
    """``Trainer._inner_training_loop`` for Trainers with a callback that has ``exact_data``."""

    @functools.wraps(train)
    def training_loop(
        self: transformers.Trainer, *args: Any, resume_from_checkpoint: str | None = None, **kwargs: Any
    ) -> Any:
        context: AbstractContextManager[Any] = nullcontext()
        if any(isinstance(one, HpcaccelCallback) and one.exact_data for one in self.callback_handler.callbacks):
            from hpcaccel.integrations.transformers_data import ExactTraining

            gate = None if settings.locate(None).run is None else stop_gate()
            context = ExactTraining(self, gate, resume_from_checkpoint)
        with context:
            return train(self, *args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    return training_loop


setattr(trainer.Trainer, "_inner_training_loop", _train_with_exact_data(trainer.Trainer._inner_training_loop))  # noqa: B010


def _checkpoint_of_this_run(output_dir: str) -> str | None:
    """The checkpoint in ``output_dir`` that this run has completed last; None without one, or if the spec has
    ``checkpoint.resume: never``."""
    run = settings.locate(None).run
    spec = {} if run is None else (read_json(run.spec) or {}).get("spec", {})
    if run is None or spec.get("checkpoint", {}).get("resume") == "never":
        return None
    starts = RunLedger.read(run).starts
    return _newest(output_dir, since=starts[0].time if starts else math.inf)
