"""fp16's loss scale, for any number of optimizers: gradients are unscaled once, and the scale changes once a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hpcaccel.errors import RuntimeMisuse

__all__ = ["Scaling"]


class Scaling:
    """Keeps torch's GradScaler in order for scripts that do not call it themselves.

    torch wants ``update`` once an iteration, after all optimizers have stepped: it forgets whose gradients are unscaled
    already. So the update waits while an optimizer whose gradients were unscaled has still to step, until the next
    backward pass at the latest.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self._backwards = 0
        self._unscaled: dict[int, int] = {}
        """Optimizers whose gradients were unscaled for a step to come, and after which backward pass."""
        self._update_due = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        if self._update_due:
            self._update()
        self._backwards += 1
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the scale in this optimizer's gradients; called again before the next backward pass, nothing."""
        at = self._unscaled.get(id(optimizer))
        if at == self._backwards:
            return
        if at is not None:
            self._update()  # the script left a step out, and these are new gradients
        self.scaler.unscale_(optimizer)
        self._unscaled[id(optimizer)] = self._backwards

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> tuple[Any, bool | torch.Tensor]:
        """Step unless gradients have overflowed; what the step gave, and whether it was skipped.

        Whether it was is known without asking the device: torch's scaler, which has to ask it, does not call the
        optimizer then. A fused optimizer is always called and decides on the device, so that a tensor comes back,
        which makes only those wait who look at it.

        Raises:
            RuntimeMisuse: a closure. It would compute new gradients, scaled, after the others were looked at.
        """
        if closure is not None:
            raise RuntimeMisuse(
                f"{type(optimizer).__name__}.step(closure) with mixed_precision=fp16: gradients that a closure "
                "computes are not unscaled. Use bf16, or an optimizer that needs no closure"
            )
        own, inner = optimizer.__dict__.get("step"), optimizer.step
        skipped: bool | torch.Tensor = True

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal skipped
            found: torch.Tensor | None = getattr(optimizer, "found_inf", None)
            skipped = False if found is None else found.detach().clone()
            return inner(*args, **kwargs)

        optimizer.step = watched  # type: ignore[method-assign]
        try:
            result = self.scaler.step(optimizer)
        finally:
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own  # type: ignore[method-assign]
        self._unscaled.pop(id(optimizer), None)
        self._update_due = True
        if not self._unscaled:
            self._update()
        return result, skipped

    def norm_of_scaled(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm that gradients with this norm have without the scale."""
        return norm / self.scaler.scale(torch.ones_like(norm))

    def _update(self) -> None:
        self.scaler.update()
        self._update_due = False
        self._unscaled.clear()
