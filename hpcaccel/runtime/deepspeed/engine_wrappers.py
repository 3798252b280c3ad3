"""DeepSpeed's engine, optimizer and scheduler as objects of Accelerate's loop, and placeholders for the last two.

The engine takes its step, with clipping and ``zero_grad``, in ``backward`` of the last micro-batch. ``step`` of the
prepared optimizer therefore only reports that step, and ``zero_grad`` does nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, optim

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallel.precision import map_tensors
from hpcaccel.runtime.training.accumulation import Accumulation
from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer
from hpcaccel.runtime.training.prepared_scheduler import PreparedScheduler

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "GatheredParameters",
    "map_pytorch_optim_to_deepspeed",
]


def _do_nothing() -> None:
    """Default of ``on_step``."""


class DeepSpeedEngineWrapper:
    """Calls DeepSpeed's engine (attribute ``engine``) in the order that it requires.

    Args:
        on_step: called once for each step, including those that the engine skips because of an overflow.
    """

    def __init__(self, engine: Any, *, on_step: Callable[[], object] = _do_nothing) -> None:
        self.engine = engine
        self.reduces = True
        """Whether a step may follow a backward pass; False inside ``no_sync``."""
        self._on_step = on_step
        self._uncounted = False
        """Whether the engine has taken a step that ``count`` has not reported yet."""
        self._script_steps = True
        """Whether the script calls ``optimizer.step()``, which reports the step as with other strategies."""
        self._warned = False

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """The backward pass, and the step if this is the last micro-batch. The engine divides the loss by the number of
        micro-batches.

        Args:
            sync_gradients: whether this is the last micro-batch of a step.
            kwargs: arguments of the engine's ``backward``: ``retain_graph``, ``scale_wrt_gas``.
        """
        if self._uncounted:
            self._script_steps = False
            self.count()
        steps = sync_gradients and self.reduces
        self.engine.set_gradient_accumulation_boundary(is_boundary=steps)
        self.engine.backward(loss, **kwargs)
        if steps:
            self.engine.step()
            self._uncounted = True
            if not self._script_steps:
                self.count()

    def count(self) -> None:
        """Report the engine's step, if it has not been reported yet."""
        if self._uncounted:
            self._uncounted = False
            self._on_step()

    def get_global_grad_norm(self) -> float | None:
        """Norm of the gradients of the last step, before clipping; None if the engine has computed none."""
        found = self.engine.get_global_grad_norm()
        return None if found is None else float(found)

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """The norm of the last step, which the engine has already clipped to the limit in its configuration. If the
        script's limit differs, warn once.

        Returns:
            The norm before clipping; NaN if the engine has computed none.
        """
        limit = float(self.engine.gradient_clipping())
        if not self._warned and (limit != float(max_norm) or norm_type != 2):
            self._warned = True
            does = f"clips to the norm {limit:g}" if limit else "does not clip"
            warnings.warn(
                f"clip_grad_norm_(max_norm={max_norm:g}, norm_type={norm_type:g}) has no effect, because DeepSpeed's "
                f"engine clips in its own step, and its configuration {does}. Set gradient_clipping to {max_norm:g} in "
                "the JSON configuration, or pass DeepSpeedPlugin(gradient_clipping=...)",
                stacklevel=4,
            )
        norm = self.get_global_grad_norm()
        return torch.tensor(float("nan") if norm is None else norm)

    def refuse_shards(self, value: Any) -> None:
        """Refuse to write tensors that are empty because ZeRO-3 has sharded them.

        Raises:
            RuntimeMisuse: ``value`` contains such tensors.
        """
        if self.engine.zero_optimization_stage() < 3:
            return

        def check(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel() == 0:
                raise RuntimeMisuse(
                    "save(): the value contains empty tensors, because ZeRO-3 shards the model's weights over the "
                    "ranks. Save accelerator.get_state_dict(model) instead, on all ranks"
                )
            return tensor

        map_tensors(value, check)

    def set_reduction(self, on: bool) -> None:
        """Turn steps and the reduction of gradients on or off; for ``no_sync``."""
        self.reduces = on


class DeepSpeedOptimizerWrapper(PreparedOptimizer):
    """DeepSpeed's optimizer. The engine takes the steps.

    Args:
        on_step: called by ``step``.
    """

    def __init__(self, optimizer: Any, *, on_step: Callable[[], object] = _do_nothing) -> None:
        super().__init__(optimizer, Accumulation(1), on_step=on_step)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Report the step, which ``accelerator.backward`` has already taken."""
        self._parts.on_step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """No effect: the engine does this in its step."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether an overflow under fp16 skipped the last step."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(PreparedScheduler):
    """A scheduler that the engine steps. The engine also saves and restores it."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        found = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        super().__init__(scheduler, [one for one in found if one is not None], Accumulation(1))

    def step(self, *args: Any, **kwargs: Any) -> None:
        """No effect: the engine steps the scheduler in its own step."""


class DummyOptim:
    """Placeholder for the optimizer of the JSON configuration, whose ``auto`` values it provides.

    Args:
        params: parameters or parameter groups.
        kwargs: further values of ``optimizer.params``, such as ``betas``.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Placeholder for the scheduler of the JSON configuration, whose ``auto`` values it provides.

    Args:
        optimizer: the script's optimizer or ``DummyOptim``.
        total_num_steps: number of the schedule's steps. As with other prepared schedulers, it is divided by the number
            of processes, unless ``step_scheduler_per_process`` is False or batches are split.
        warmup_num_steps: number of optimizer steps over which the learning rate increases.
        lr_scheduler_callable: a function that returns a scheduler for an optimizer. The engine calls it instead of
            creating the scheduler of the configuration.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
) -> Iterator[None]:
    """Context in which ZeRO-3's shards are whole parameters. All ranks enter it; other parameters are not changed.

    Args:
        params: a parameter, several, or a module's.
        modifier_rank: the rank whose changes all ranks get; None if the parameters are only read.
    """
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    if not (enabled and any(hasattr(parameter, "ds_id") for parameter in params)):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield


def map_pytorch_optim_to_deepspeed(optimizer: optim.Optimizer) -> Any:
    """DeepSpeed's optimizer for states in CPU memory, with the parameter groups of ``optimizer``: for Adagrad its
    Adagrad, for other optimizers its Adam or AdamW."""
    settings = {name: optimizer.defaults[name] for name in ("lr", "weight_decay") if name in optimizer.defaults}
    if isinstance(optimizer, optim.Adagrad):
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        return DeepSpeedCPUAdagrad(optimizer.param_groups, **settings)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=isinstance(optimizer, optim.AdamW), **settings)
