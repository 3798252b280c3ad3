"""Prepared optimizers: they act at accumulation boundaries and do nothing in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from hpcaccel.runtime.training.accumulation import Accumulation
from hpcaccel.runtime.training.prepared_scheduler import PreparedScheduler
from hpcaccel.runtime.training.scaling import Scaling

__all__ = ["PreparedOptimizer", "PreparedScheduler"]


def _nothing() -> None:
    """What happens when an optimizer steps that nobody counts."""


class PreparedOptimizer(Optimizer):
    """A face for the user's optimizer, which stays reachable as ``optimizer``.

    ``step`` and ``zero_grad`` do nothing between accumulation boundaries; with a scaler ``step`` unscales first and may
    be skipped after an overflow (``step_was_skipped``). What is not here is the user's optimizer's own.

    Args:
        scaling: of fp16, shared by all prepared optimizers; None for other precisions.
        before_step: called before each step; what it raises comes instead of the step.
        on_step: called after each step, skipped ones included.
    """

    _of_this_process: ClassVar[Callable[[], tuple[Accumulation, Scaling | None]]] = lambda: (Accumulation(1), None)
    """The accumulation and the scaling of the session of this process, for copies that have come from elsewhere."""

    def __init__(
        self,
        optimizer: Optimizer,
        accumulation: Accumulation,
        *,
        scaling: Scaling | None = None,
        before_step: Callable[[], object] = _nothing,
        on_step: Callable[[], object] = _nothing,
    ) -> None:
        # Optimizer.__init__ would build parameter groups of its own; the user's are the ones that count.
        self.optimizer = optimizer
        self._skipped: bool | torch.Tensor = False
        self._accumulation = accumulation
        self._scaling = scaling
        self._before_step = before_step
        self._on_step = on_step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """
        Raises:
            RuntimeMisuse: a closure under fp16; gradients that have not come to their shards.
        """
        if not self._accumulation.is_boundary:
            return None
        self._before_step()
        # Looked up anew each time: schedulers and others put wrappers around an optimizer's step at any time.
        if self._scaling is not None:
            result, self._skipped = self._scaling.step(self.optimizer, closure)
        elif closure is None:
            result = self.optimizer.step()
        else:
            result = self.optimizer.step(closure)
        self._on_step()
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """None: as the user's optimizer does when nothing is said."""
        if not self._accumulation.is_boundary:
            return
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def step_was_skipped(self) -> bool:
        """Whether an overflow under fp16 skipped the last step."""
        if self._skipped is not False and self._skipped is not True:
            self._skipped = bool(self._skipped)
        return self._skipped

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return None if self._scaling is None else self._scaling.scaler

    def train(self) -> None:
        """For optimizers that have modes, such as schedule-free ones; others do nothing."""
        self._switch("train")

    def eval(self) -> None:
        """For optimizers that have modes, such as schedule-free ones; others do nothing."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    # -- the user's optimizer's own ---------------------------------------------------------------------------------

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

    # -- copies -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "skipped": self.step_was_skipped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy follows the accumulation of the session that it wakes up in, and does not count steps."""
        accumulation, scaling = PreparedOptimizer._of_this_process()
        PreparedOptimizer.__init__(self, state["optimizer"], accumulation, scaling=scaling)
        self._skipped = state["skipped"]
