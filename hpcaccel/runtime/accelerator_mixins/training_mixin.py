"""A training step: accumulate, backward, clip, in the chosen precision."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.accelerator_mixins.session_mixin import Face
from hpcaccel.runtime.training import clipping, gradient_sync
from hpcaccel.runtime.training.accumulation import MicroBatch

if TYPE_CHECKING:
    from hpcaccel.runtime.handlers import AutocastKwargs, ProfileKwargs

__all__ = ["TrainFace"]


class TrainFace(Face):
    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends in an optimizer step. Set it for a script that accumulates by itself."""
        return self._setup.accumulation.is_boundary

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._setup.accumulation.is_boundary = bool(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches for one optimizer step."""
        return self._setup.accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._setup.accumulation.set_steps(steps)

    @property
    def gradient_state(self) -> Any:
        """Where accumulation stands, as ``GradientState`` shows it."""
        from hpcaccel.runtime.distributed.process_states import GradientState

        return GradientState(_accumulation=self._setup.accumulation)

    @property
    def mixed_precision(self) -> str:
        return self._session.settings.mixed_precision

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """torch's scaler under fp16, else None."""
        return self._session.scaler

    @property
    def fp8_backend(self) -> str:
        """What computes in fp8: ``AO``, ``TE``, ``MSAMP``, or ``NO``."""
        recipe = self._session.handlers.fp8
        if recipe is None:
            return os.environ.get("ACCELERATE_FP8_BACKEND", "NO").upper()
        return str(getattr(recipe, "backend", None) or type(recipe).__name__.removesuffix("RecipeKwargs")).upper()

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an overflow under fp16 skipped the last step of any prepared optimizer."""
        return any(face.step_was_skipped for face in self._session.faces)

    def accumulate(self, *models: nn.Module) -> MicroBatch:
        """Around each micro-batch: gradients are shared among the ranks only where an optimizer step follows."""
        return self._setup.micro_batch(models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients to this rank."""
        return gradient_sync.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Share all gradients in the backward pass inside, those of forward passes inside ``no_sync`` too."""
        return gradient_sync.trigger_sync_in_backward(model)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """``loss.backward(**kwargs)``, divided by the accumulation steps and scaled for fp16.

        Args:
            loss: a scalar; of this rank's micro-batch alone, not divided by the number of micro-batches.
        """
        session = self._session
        session.loop.backward_begins()
        accumulation = self._setup.accumulation
        steps = accumulation.steps
        if steps > 1:
            if not accumulation.looked:
                accumulation.looked = True
                from hpcaccel.runtime.training.double_scaling_check import warn_if_divided

                warn_if_divided(loss, steps)
            loss = loss / steps
        if session.scaling is not None:
            loss = session.scaling.scale(loss)
        try:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # FSDP2 has freed the parameters, and has not found the way back to them.
            if "setStorage" in str(error) and (cause := session.sharded.cause()) is not None:
                raise RuntimeMisuse(
                    f"the backward pass has not found the sharded model's parameters. {cause}"
                ) from error
            raise

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> torch.autocast:
        """The precision of prepared models, for computations outside of them."""
        from hpcaccel.runtime.parallel import precision

        session = self._session
        handler = self._setup.handlers.autocast if autocast_handler is None else autocast_handler
        return precision.autocast(session.group.device, session.settings.mixed_precision, handler)

    def clip_grad_norm_(self, parameters: clipping.Parameters, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scale the gradients of ``parameters``, any of them, down to ``max_norm``; the norm over all ranks before.

        Between accumulation boundaries gradients stay as they are, and the norm is that of this rank so far.
        """
        return clipping.clip_norm(self._setup, parameters, max_norm=max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: clipping.Parameters, clip_value: float) -> None:
        """Cut gradients off at ``clip_value``."""
        clipping.clip_value(self._setup, parameters, limit=clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Under fp16 undo the scale in the gradients of one prepared optimizer, of several, or of all.

        Raises:
            RuntimeMisuse: something that is no prepared optimizer.
        """
        clipping.unscale(self._setup, optimizer)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """``torch.profiler`` around what is inside, set up by a ``ProfileKwargs``, given here or to the constructor.

        Raises:
            RuntimeMisuse: an activity that torch does not know.
        """
        from hpcaccel.runtime.handlers import ProfileKwargs
        from hpcaccel.runtime.training.profiling import Profile

        handler = profile_handler or self._setup.handlers.profile or ProfileKwargs()
        return Profile(handler, self._session.group)
