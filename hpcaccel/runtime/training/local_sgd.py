"""Local SGD: each rank trains for some steps by itself, then all take the mean of their parameters.

The method: Zhang, De Sa, Mitliagkas, Ré, "Parallel SGD: When does averaging help?" (2016); Stich, "Local SGD Converges
Fast and Communicates Little" (2019).
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.collectives.gathering import is_checked
from hpcaccel.runtime.parallel.dtensors import is_dtensor
from hpcaccel.runtime.training.gradient_sync import no_sync

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator import Accelerator

__all__ = ["LocalSGD"]


class LocalSGD:
    """``with LocalSGD(accelerator=..., model=..., local_sgd_steps=8) as local_sgd:`` around the training loop, and
    ``local_sgd.step()`` after each optimizer step.

    Gradients stay on their rank inside. Parameters become the mean of all ranks' after every ``local_sgd_steps`` steps
    and at the end of the block; optimizer state and buffers stay each rank's own.

    Raises:
        RuntimeMisuse: a sharded model, whose ranks cannot train alone; fewer steps than one.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if local_sgd_steps < 1:
            raise RuntimeMisuse(f"LocalSGD(local_sgd_steps={local_sgd_steps}) must be at least 1")
        if enabled and any(is_dtensor(parameter) for parameter in model.parameters()):
            raise RuntimeMisuse(
                "LocalSGD needs the whole model on every rank, and this one is sharded: take strategy='ddp'"
            )
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self._group = accelerator._session.group

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            no_sync(self.model).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.enabled:
            no_sync(self.model).__exit__(kind, error, traceback)
            if kind is None:
                self._average()

    def step(self) -> None:
        """One optimizer step has been done."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        """One reduction for all parameters of a type.

        Raises:
            RuntimeMisuse: some ranks make fewer steps.
        """
        exchange = self._group.exchange
        assert exchange is not None
        if self._group.device.type == "cpu" or is_checked(exchange, self._group):
            exchange.call("LocalSGD", value=self.num_steps)
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in self.model.parameters():
            by_type.setdefault(parameter.dtype, []).append(parameter.detach())
        for parameters in by_type.values():
            flat = torch.cat([parameter.reshape(-1) for parameter in parameters])
            dist.all_reduce(flat)
            flat /= self._group.world_size
            parts = torch.split(flat, [own.numel() for own in parameters])
            for own, part in zip(parameters, parts, strict=True):
                own.copy_(part.view_as(own))
