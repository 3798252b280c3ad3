"""LOMO: optimizers of the package lomo-optim, which update each parameter during the backward pass and then free its
gradient. There are no gradients left to reduce over ranks, to accumulate or to clip."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator_setup import Setup

__all__ = ["LomoError", "LomoOptimizer", "fused_backward", "is_lomo", "refuse_clipping", "refuse_setup"]


class LomoError(RuntimeMisuse, ValueError):
    """LOMO cannot work in this training, or was called wrongly. Accelerate raises ValueError."""


def is_lomo(optimizer: Any) -> bool:
    """Whether this is a ``Lomo`` or an ``AdaLomo``."""
    package: Any = sys.modules.get("lomo_optim")  # imported if the script has created one
    return package is not None and isinstance(optimizer, (package.Lomo, package.AdaLomo))


class LomoOptimizer(PreparedOptimizer):
    """A prepared LOMO optimizer. Its steps are taken, and counted, in the backward pass."""

    _has_stepped = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """No effect: ``backward`` has taken the step.

        Raises:
            LomoError: ``backward`` was not called with a learning rate; a closure is given.
        """
        name = type(self.optimizer).__name__
        if closure is not None:
            raise LomoError(f"{name}.step(closure): {name} updates parameters in accelerator.backward()")
        if not self._has_stepped:
            raise LomoError(
                f"{name}.step(): {name} updates parameters in the backward pass, and needs the learning rate there: "
                "call accelerator.backward(loss, learning_rate=...)"
            )

    def fused_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run the backward pass, which also updates the parameters."""
        optimizer: Any = self.optimizer
        optimizer.fused_backward(loss, learning_rate)
        optimizer._opt_called = True  # torch's schedulers warn if no step came before theirs
        self._has_stepped = True
        self._parts.on_step()


def refuse_setup(setup: Setup, objects: Sequence[Any]) -> None:
    """Refuse LOMO optimizers among objects that are prepared, in a training in which they cannot work.

    Raises:
        LomoError: there are several ranks, or two LOMO optimizers; the strategy is not ``ddp``; the precision is fp16.
    """
    found = [one for one in objects if is_lomo(one) or isinstance(one, LomoOptimizer)]
    if not found:
        return
    session = setup.session
    name = type(found[0]).__name__
    known = {id(one.optimizer) for one in session.optimizers if isinstance(one, LomoOptimizer)}
    if len({*known, *(id(getattr(one, "optimizer", one)) for one in found)}) > 1:
        raise LomoError(f"prepare({name}): there are several LOMO optimizers, and a training can have only one")
    if session.settings.strategy != "ddp" or session.group.world_size > 1:
        raise LomoError(
            f"prepare({name}): {name} updates parameters before gradients are reduced over the ranks, so it works on "
            f"one rank with strategy='ddp' only. This training has {session.group.world_size} ranks and strategy="
            f"{session.settings.strategy!r}. Use another optimizer, such as torch.optim.SGD with strategy='fsdp'"
        )
    if session.settings.mixed_precision == "fp16":
        raise LomoError(f"prepare({name}): {name} does not use the gradient scaler of mixed_precision=fp16. Use bf16")


def fused_backward(setup: Setup, loss: torch.Tensor, learning_rate: float | None) -> None:
    """Run the backward pass of the prepared LOMO optimizer.

    Raises:
        LomoError: there is no learning rate, or no LOMO optimizer; gradients are accumulated.
    """
    if learning_rate is None:
        raise LomoError("lomo_backward() needs the learning rate of the step: pass learning_rate, such as 1e-3")
    optimizer = next((one for one in setup.session.optimizers if isinstance(one, LomoOptimizer)), None)
    if optimizer is None:
        raise LomoError(
            f"backward(learning_rate={learning_rate!r}) needs a LOMO optimizer, and none was prepared: pass a Lomo or "
            "an AdaLomo of lomo_optim to prepare(), or leave learning_rate out"
        )
    if setup.accumulation.steps > 1 or not setup.accumulation.is_boundary:
        raise LomoError(
            f"{type(optimizer.optimizer).__name__} updates parameters in each backward pass, so gradients cannot be "
            f"accumulated (gradient_accumulation_steps={setup.accumulation.steps}): use larger batches, or another "
            "optimizer"
        )
    setup.session.loop.backward_begins()
    optimizer.fused_backward(loss, learning_rate)


def refuse_clipping(optimizers: Sequence[Any], parameters: Sequence[torch.Tensor], call: str) -> None:
    """Refuse to clip gradients that a LOMO optimizer has used already.

    Args:
        call: the method's name, for the error message.

    Raises:
        LomoError: one of the parameters is a LOMO optimizer's.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LomoOptimizer):
            name, own = type(optimizer.optimizer).__name__, {id(one) for one in _parameters(optimizer)}
            if any(id(parameter) in own for parameter in parameters):
                raise LomoError(
                    f"{call}(): {name} has used and freed the gradients in backward(). Pass clip_grad_norm or "
                    f"clip_grad_value to {name}; for the norm, call optimizer.grad_norm(loss) before backward()"
                )


def _parameters(optimizer: PreparedOptimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
