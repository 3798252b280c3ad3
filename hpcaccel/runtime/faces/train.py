"""A training step: accumulate, backward, clip, in the chosen precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hpcaccel.runtime import parallel, precision
from hpcaccel.runtime.clipping import clip_norm, clip_value
from hpcaccel.runtime.session import Session

__all__ = ["TrainFace"]


class TrainFace:
    _session: Session

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends in an optimizer step."""
        return self._session.accumulation.is_boundary

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._session.accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._session.accumulation.steps = steps

    @property
    def mixed_precision(self) -> str:
        return self._session.settings.mixed_precision

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Around each micro-batch: gradients are shared among the ranks only where an optimizer step follows."""
        self._session.accumulation.begin_micro_batch()
        with ExitStack() as stack:
            if not self.sync_gradients:
                for model in models:
                    stack.enter_context(parallel.no_sync(model))
            yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients to this rank."""
        return parallel.no_sync(model)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """``loss.backward()``, divided by the accumulation steps and scaled for fp16."""
        loss = loss / self.gradient_accumulation_steps if self.gradient_accumulation_steps > 1 else loss
        if self._session.scaler is not None:
            loss = self._session.scaler.scale(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def autocast(self) -> torch.autocast:
        """The precision of prepared models, for computations outside of them."""
        return precision.autocast(self._session.group.device, self.mixed_precision)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor | None:
        """Scale gradients down to ``max_norm``; the norm before, or None between accumulation boundaries."""
        return clip_norm(self._session, parameters, max_norm=max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value_: float) -> None:
        """Cut gradients off at ``clip_value_``."""
        clip_value(self._session, parameters, limit=clip_value_)
