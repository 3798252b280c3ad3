"""Methods of the training loop: accumulation, backward, clipping, precision; steps, resuming, saving and stopping."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.accelerator_mixins import SessionMixin

if TYPE_CHECKING:
    from hpcaccel.runtime.handlers import AutocastKwargs, ProfileKwargs
    from hpcaccel.runtime.training import clipping
    from hpcaccel.runtime.training.accumulation import MicroBatch
    from hpcaccel.runtime.training.resumption import ResumedCounters

__all__ = ["TrainingMixin"]


class TrainingMixin(SessionMixin):
    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends in an optimizer step. Set it if the script accumulates gradients itself."""
        return self._setup.accumulation.is_boundary

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._setup.accumulation.is_boundary = bool(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches per optimizer step. Setting it to anything but a positive integer raises
        RuntimeMisuse."""
        return self._setup.accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._setup.accumulation.set_steps(steps)

    @property
    def gradient_state(self) -> Any:
        """The state of accumulation, as a ``GradientState``."""
        from hpcaccel.runtime.states.gradient_state import GradientState

        return GradientState(_accumulation=self._setup.accumulation)

    @property
    def mixed_precision(self) -> str:
        """Precision of the forward pass: ``no``, ``fp16``, ``bf16`` or ``fp8``."""
        return self._session.settings.mixed_precision

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """torch's gradient scaler under fp16, else None."""
        return self._session.scaler

    @property
    def fp8_backend(self) -> str:
        """Library of the fp8 recipe: ``AO``, ``TE`` or ``MSAMP``. Without a recipe, the value of the variable
        ``ACCELERATE_FP8_BACKEND``, or ``NO`` if it is not set."""
        recipe = self._setup.handlers.fp8
        if recipe is None:
            return os.environ.get("ACCELERATE_FP8_BACKEND", "NO").upper()
        return str(getattr(recipe, "backend", None) or type(recipe).__name__.removesuffix("RecipeKwargs")).upper()

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an overflow under fp16 skipped the last step of any prepared optimizer."""
        return any(optimizer.step_was_skipped for optimizer in self._session.optimizers)

    def accumulate(self, *models: nn.Module) -> MicroBatch:
        """Context of one micro-batch: gradients of ``models`` are reduced over the ranks only if an optimizer step
        follows or ``sync_each_batch`` is set. Prepared optimizers step only in the last micro-batch.

        Example::

            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_function(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
        """
        return self._setup.micro_batch(models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which the gradients of a model under DDP or FSDP are not reduced over the ranks. It has no effect
        on other models."""
        from hpcaccel.runtime.training import gradient_sync

        return gradient_sync.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context whose backward pass reduces all gradients, including those of forward passes inside ``no_sync``."""
        from hpcaccel.runtime.training import gradient_sync

        return gradient_sync.trigger_sync_in_backward(model)

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether a LOMO optimizer was prepared: a ``Lomo`` or ``AdaLomo`` of lomo-optim."""
        from hpcaccel.runtime.training.lomo import LomoOptimizer

        return any(isinstance(optimizer, LomoOptimizer) for optimizer in self._session.optimizers)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run the backward pass of a LOMO optimizer, in which the optimizer updates the parameters.

        Args:
            learning_rate: that of this step, such as ``scheduler.get_last_lr()[0]``.

        Raises:
            RuntimeMisuse: no LOMO optimizer was prepared; there is no learning rate; gradients are accumulated.
        """
        from hpcaccel.runtime.training import lomo

        lomo.fused_backward(self._setup, loss, learning_rate)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Call ``loss.backward(**kwargs)``, after dividing the loss by the accumulation steps and scaling it for fp16.
        DeepSpeed's engine does this itself, and takes the step in the backward pass of the last micro-batch.

        Args:
            loss: scalar loss of this rank's micro-batch, not divided by the number of micro-batches.
            kwargs: arguments of ``loss.backward``; with ``learning_rate``, this is ``lomo_backward``.

        Raises:
            RuntimeMisuse: FSDP2 did not find all tensors that a sharded module returned, and has freed its parameters.
        """
        if kwargs and (learning_rate := kwargs.pop("learning_rate", None)) is not None:
            self.lomo_backward(loss, learning_rate)
            return
        setup = self._setup
        session, accumulation = setup.session, setup.accumulation
        if session.was_reset:
            session = self._session
        session.loop.backward_begins()
        steps = accumulation.steps
        if steps > 1:
            if not accumulation.checked_loss:
                accumulation.checked_loss = True
                from hpcaccel.runtime.training.accumulation import warn_if_divided

                warn_if_divided(loss, steps)
            if session.engine is None:  # DeepSpeed's engine divides, too
                loss = loss / steps
        if session.engine is not None:
            session.engine.backward(loss, accumulation.is_boundary, **kwargs)
            return
        if session.scaling is not None:
            loss = session.scaling.scale(loss)
        try:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # FSDP2 has freed the parameters and cannot restore them.
            if "setStorage" in str(error) and (cause := session.sharded.cause()) is not None:
                raise RuntimeMisuse(
                    f"FSDP2 could not restore the sharded model's parameters in the backward pass. {cause}"
                ) from error
            raise

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> torch.autocast:
        """``torch.autocast`` with the precision of prepared models, for computations outside them. It is disabled if
        ``native_amp`` is False.

        Args:
            autocast_handler: options for this context; default: those of the constructor's ``kwargs_handlers``.
        """
        from hpcaccel.runtime.parallel import precision

        session = self._session
        handler = self._setup.handlers.autocast if autocast_handler is None else autocast_handler
        mixed_precision, enabled = session.settings.mixed_precision, self._setup.native_amp
        return precision.autocast(session.group.device, mixed_precision, handler, enabled=enabled)

    def clip_grad_norm_(self, parameters: clipping.Parameters, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scale the gradients of ``parameters`` so that their norm is at most ``max_norm``.

        Args:
            parameters: a tensor or an iterable of tensors, such as ``model.parameters()``.
            max_norm: maximum norm of all gradients together.
            norm_type: p of the p-norm, such as 2 or ``math.inf``.

        Returns:
            The norm before scaling, over all ranks. Between accumulation boundaries gradients are unchanged, and the
            norm is that of the gradients accumulated so far, which the ranks may not have reduced yet. DeepSpeed's
            engine clips as configured; the norm is that of its last step.
        """
        from hpcaccel.runtime.training import clipping

        if (engine := self._session.engine) is not None:
            return engine.clip(max_norm, norm_type)
        return clipping.clip_norm(self._setup, parameters, max_norm=max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: clipping.Parameters, clip_value: float) -> None:
        """At accumulation boundaries, clamp gradients to the range from ``-clip_value`` to ``clip_value``.

        Args:
            parameters: a tensor or an iterable of tensors, such as ``model.parameters()``.

        Raises:
            RuntimeMisuse: the training uses DeepSpeed.
        """
        from hpcaccel.runtime.training import clipping

        if self._session.engine is not None:
            raise RuntimeMisuse(
                "clip_grad_value_() cannot be combined with DeepSpeed, whose engine clips the norm of the gradients: "
                "set gradient_clipping in its configuration"
            )

        clipping.clip_value(self._setup, parameters, limit=clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Under fp16, at accumulation boundaries, divide the gradients of prepared optimizers by the loss scale.

        Args:
            optimizer: one prepared optimizer, a list of them, or None for all.

        Raises:
            RuntimeMisuse: an object is not a prepared optimizer.
        """
        from hpcaccel.runtime.training import clipping

        clipping.unscale(self._setup, optimizer)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """Context with ``torch.profiler``, configured by the ``ProfileKwargs`` given here or to the constructor.

        Raises:
            RuntimeMisuse: an activity is unknown.

        Example::

            with accelerator.profile() as profiler:
                model(torch.randn(16, 4))
            accelerator.print(profiler.key_averages().table(row_limit=10))
        """
        from hpcaccel.runtime.handlers import ProfileKwargs
        from hpcaccel.runtime.training.profile_context import ProfileContext

        handler = profile_handler or self._setup.handlers.profile or ProfileKwargs()
        return ProfileContext(handler, self._session.group)

    # -- the loop: steps, resuming, saving, stopping ------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of completed optimizer steps, including those before a resume."""
        return self._session.loop.step

    def resume(self) -> ResumedCounters:
        """Load the newest checkpoint into all prepared objects.

        Returns:
            An object with the attributes ``step``, ``epoch`` and ``path`` of the checkpoint. If there is no checkpoint,
            they are 0, 0 and None.

        Raises:
            RuntimeMisuse: nothing has been prepared, or this program has already completed a training with this
                checkpoint directory.
            CheckpointError: the checkpoint could not be loaded.
            SystemExit: a stop was requested before the first step, and the run is to be continued later.
        """
        return self._session.loop.resume()

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the numbers (from 0) of the remaining epochs out of ``count``. Calls ``resume`` if the script
        has not. Saves, stops and raises as ``resume`` and ``checkpoint`` do."""
        return self._session.loop.epochs(count)

    def steps(self, count: int) -> Iterator[int]:
        """Iterate over the numbers (from 0) of the remaining steps out of ``count``, without epochs. Calls ``resume``
        if the script has not. Saves, stops and raises as ``resume`` and ``checkpoint`` do."""
        return self._session.loop.steps(count)

    def checkpoint(self) -> None:
        """Save if a save is due. If the run must stop and continue later, save and raise SystemExit.

        Call it once per step.

        Raises:
            SystemExit: on all ranks at the same step, if the run must stop and continue later. The exit code is 85, or
                143 if there is no checkpoint directory.
            CheckpointError: the checkpoint could not be saved.
            RuntimeMisuse: the run has a checkpoint that the script has not loaded, or this program has already
                completed a training with this checkpoint directory.
        """
        session = self._setup.session
        if session.was_reset:
            session = self._session
        loop = session.loop
        if loop.boundary.script_reports and loop.optimizers:
            loop.step_is_over()  # all that ``loop.checkpoint`` would do
        else:
            loop.checkpoint()

    def should_stop(self) -> bool:
        """Whether the training is to end for good; ``epochs``, ``steps`` and the training's loader then end, too."""
        return self._session.loop.should_stop()
