"""Prepared optimizers and schedulers: they act at accumulation boundaries and do nothing in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hpcaccel.runtime.accumulation import Accumulation

__all__ = ["PreparedOptimizer", "PreparedScheduler"]


class PreparedOptimizer(Optimizer):
    """A face for the user's optimizer, which stays reachable as ``optimizer``.

    ``step`` and ``zero_grad`` do nothing between accumulation boundaries; with a scaler ``step`` unscales first and may
    be skipped after an overflow (``step_was_skipped``).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        accumulation: Accumulation,
        *,
        scaler: torch.amp.GradScaler | None,
        on_step: Callable[[], None],
    ) -> None:
        # Optimizer.__init__ would build parameter groups of its own; the user's are the ones that count.
        self.optimizer = optimizer
        self.step_was_skipped = False
        self._accumulation = accumulation
        self._scaler = scaler
        self._on_step = on_step

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"Prepared({self.optimizer!r})"

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._accumulation.is_boundary:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self._accumulation.is_boundary:
            return None
        loss = self._scaled_step(closure) if self._scaler is not None else self.optimizer.step(closure)
        self._on_step()
        return loss

    def _scaled_step(self, closure: Callable[[], Any] | None) -> Any:
        assert self._scaler is not None
        before = self._scaler.get_scale()
        loss = self._scaler.step(self.optimizer, *([] if closure is None else [closure]))
        self._scaler.update()
        self.step_was_skipped = self._scaler.get_scale() < before
        return loss


class PreparedScheduler:
    """A face for the user's scheduler: it steps when its optimizers do.

    Args:
        repeats: how often the user's scheduler steps for one step here. Accelerate steps it once a process, and its
            users multiply their schedules accordingly.
    """

    def __init__(
        self, scheduler: Any, optimizers: list[PreparedOptimizer], accumulation: Accumulation, *, repeats: int
    ) -> None:
        self.scheduler = scheduler
        self._optimizers = optimizers
        self._accumulation = accumulation
        self._repeats = repeats

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self._accumulation.is_boundary or any(optimizer.step_was_skipped for optimizer in self._optimizers):
            return
        for _ in range(self._repeats):
            # A schedule with an end of its own, such as OneCycleLR, fails when it is stepped beyond it.
            if self.scheduler.last_epoch < getattr(self.scheduler, "total_steps", float("inf")):
                self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)
