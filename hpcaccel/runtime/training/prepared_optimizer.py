"""``PreparedOptimizer``: an optimizer that steps at accumulation boundaries only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from hpcaccel.runtime.distributed.xla_device import GradientReducer
from hpcaccel.runtime.training.accumulation import Accumulation
from hpcaccel.runtime.training.prepared_scheduler import PreparedScheduler
from hpcaccel.runtime.training.scaling import Scaling

__all__ = ["PreparedOptimizer", "PreparedScheduler"]


_SHOWN = ("accelerator_state", "gradient_state", "device_placement")
"""Attributes that a step does not use."""


def _do_nothing() -> None:
    """Default of ``before_step`` and ``on_step``."""


class PreparedOptimizer(Optimizer):
    """Wraps the script's optimizer (attribute ``optimizer``), and delegates all other attributes to it.

    ``step`` and ``zero_grad`` do nothing between accumulation boundaries. With a scaler, ``step`` first unscales the
    gradients, and takes no step if they have overflowed (``step_was_skipped``).

    Args:
        scaling: gradient scaling for fp16, shared by all prepared optimizers; None for other precisions.
        before_step: called before each step; if it raises, the step is not taken.
        on_step: called after each step, including skipped ones.
        reducer: averages gradients over the ranks where DDP does not, once per step; None elsewhere.
    """

    accelerator_state: Any
    gradient_state: Any
    """Views of the states, as Accelerate's optimizer has them. ``prepare`` sets them."""
    device_placement: bool
    """The value with which the optimizer was prepared. Its state is on the device of the parameters in any case."""
    _followed_by_copies: ClassVar[tuple[Accumulation, Scaling | None] | None] = None
    """Accumulation and scaling that copies unpickled in this process use. Set by ``follow_in_copies``."""

    def __init__(
        self,
        optimizer: Optimizer,
        accumulation: Accumulation,
        *,
        scaling: Scaling | None = None,
        before_step: Callable[[], object] = _do_nothing,
        on_step: Callable[[], object] = _do_nothing,
        reducer: GradientReducer | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: it would create new parameter groups.
        self.optimizer = optimizer
        self._skipped: bool | torch.Tensor = False
        self._accumulation = accumulation
        self._scaling = scaling
        self._before_step = before_step
        self._on_step = on_step
        self._reducer = reducer

    def before_first_step(self, check: Callable[[], object]) -> None:
        """Call ``check`` once, before the first step."""
        before_step = self._before_step

        def once() -> None:
            self._before_step = before_step
            check()
            before_step()

        self._before_step = once

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, at accumulation boundaries only.

        Raises:
            RuntimeMisuse: a closure is given under fp16, or gradients were not reduced to their shards.
        """
        if not self._accumulation.is_boundary:
            return None
        self._before_step()
        if self._reducer is not None:
            self._reducer.reduce(self.optimizer)
        # Looked up at each step, because schedulers and other code may wrap an optimizer's step at any time.
        if self._scaling is not None:
            result, self._skipped = self._scaling.step(self.optimizer, closure)
        elif closure is None:
            result = self.optimizer.step()
        else:
            result = self.optimizer.step(closure)
        if self._reducer is not None:
            self._reducer.step_is_done(self.optimizer)
        self._on_step()
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Zero the gradients, at accumulation boundaries only.

        Args:
            set_to_none: as in torch; if None, the default of the script's optimizer applies.
        """
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
        """Switch an optimizer that has modes (a schedule-free one) to training mode; no effect on other optimizers."""
        self._switch("train")

    def eval(self) -> None:
        """Switch an optimizer that has modes to evaluation mode; no effect on other optimizers."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    # -- delegated to the script's optimizer -------------------------------------------------------------------------

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

    @staticmethod
    def follow_in_copies(accumulation: Accumulation | None, scaling: Scaling | None = None) -> None:
        """Set the accumulation and scaling that copies unpickled from now on use.

        If ``accumulation`` is None, copies take every step.
        """
        PreparedOptimizer._followed_by_copies = None if accumulation is None else (accumulation, scaling)

    def __getstate__(self) -> dict[str, Any]:
        shown = {name: vars(self)[name] for name in _SHOWN if name in vars(self)}
        return {"optimizer": self.optimizer, "skipped": self.step_was_skipped, "shown": shown}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which uses the accumulation of the current session and does not count steps."""
        accumulation, scaling = PreparedOptimizer._followed_by_copies or (Accumulation(1), None)
        PreparedOptimizer.__init__(self, state["optimizer"], accumulation, scaling=scaling)
        self._skipped = state["skipped"]
        vars(self).update(state["shown"])
