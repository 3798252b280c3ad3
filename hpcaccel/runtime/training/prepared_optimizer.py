"""``PreparedOptimizer``: an optimizer that steps at accumulation boundaries only."""

from __future__ import annotations

from collections.abc import Callable, Sized
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


class _StepParts:
    """What the steps of a prepared optimizer use, in an object of its own: a class with ``__getattr__``, such as
    ``PreparedOptimizer``, reads each of its attributes several times more slowly."""

    __slots__ = ("accumulation", "before_step", "checks", "is_plain", "on_step", "reducer", "scaling")

    def __init__(
        self,
        accumulation: Accumulation,
        scaling: Scaling | None,
        *,
        before_step: Callable[[], object],
        checks: Sized | None,
        on_step: Callable[[], object],
        reducer: GradientReducer | None,
    ) -> None:
        self.accumulation = accumulation
        self.scaling = scaling
        self.before_step = before_step
        self.checks = (before_step,) if checks is None else checks
        self.on_step = on_step
        self.reducer = reducer
        self.is_plain = scaling is None and reducer is None
        """Whether a step is only that of the script's optimizer."""


class PreparedOptimizer(Optimizer):
    """Wraps the script's optimizer (attribute ``optimizer``), and delegates all other attributes to it.

    ``step`` and ``zero_grad`` do nothing between accumulation boundaries. With a scaler, ``step`` first unscales the
    gradients, and takes no step if they have overflowed (``step_was_skipped``).

    Args:
        scaling: gradient scaling for fp16, shared by all prepared optimizers; None for other precisions.
        before_step: called before each step; if it raises, the step is not taken.
        checks: while this is empty, ``before_step`` is not called. If None, it always is.
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
        checks: Sized | None = None,
        on_step: Callable[[], object] = _do_nothing,
        reducer: GradientReducer | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: it would create new parameter groups.
        self.optimizer = optimizer
        self._skipped: bool | torch.Tensor = False
        self._parts = _StepParts(
            accumulation, scaling, before_step=before_step, checks=checks, on_step=on_step, reducer=reducer
        )

    def before_first_step(self, check: Callable[[], object]) -> None:
        """Call ``check`` once, before the first step."""
        parts = self._parts
        before_step, checks = parts.before_step, parts.checks

        def once() -> None:
            parts.before_step, parts.checks = before_step, checks
            check()
            if checks:
                before_step()

        parts.before_step, parts.checks = once, (once,)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, at accumulation boundaries only.

        Raises:
            RuntimeMisuse: a closure is given under fp16, or gradients were not reduced to their shards.
        """
        parts = self._parts
        if not parts.accumulation.is_boundary:
            return None
        if parts.checks:
            parts.before_step()
        # Looked up at each step, because schedulers and other code may wrap an optimizer's step at any time.
        result = self.optimizer.step() if closure is None and parts.is_plain else self._step(closure)
        parts.on_step()
        return result

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """Take a step with what the precision, the device and the closure add to it."""
        parts, optimizer = self._parts, self.optimizer
        if parts.reducer is not None:
            parts.reducer.reduce(optimizer)
        if parts.scaling is not None:
            result, self._skipped = parts.scaling.step(optimizer, closure)
        else:
            result = optimizer.step() if closure is None else optimizer.step(closure)
        if parts.reducer is not None:
            parts.reducer.step_is_done(optimizer)
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Zero the gradients, at accumulation boundaries only.

        Args:
            set_to_none: as in torch; if None, the default of the script's optimizer applies.
        """
        if not self._parts.accumulation.is_boundary:
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
        scaling = self._parts.scaling
        return None if scaling is None else scaling.scaler

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
