"""Gradient accumulation: which micro-batches end in an optimizer step.

An optimizer step follows every ``steps``-th micro-batch and, by default, the last batch of the loader in use, so that
no gradients are carried over to the next epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Sized
from typing import Any

import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.loaders_in_use import LoadersInUse
from hpcaccel.runtime.distributed.collectives.call_site import call_site
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.training.gradient_sync import NO_REDUCTION, NoSync, no_sync

__all__ = ["Accumulation", "MicroBatch", "samples_per_step", "warn_if_divided"]


_PASSED_THROUGH = ("ToCopyBackward0", "CloneBackward0", "ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0")
"""Graph nodes that do not change the value; the search for a division skips them."""


class Accumulation:
    """Counts micro-batches. ``is_boundary`` is True if an optimizer step follows the current micro-batch, and before
    the first micro-batch.

    Args:
        steps: micro-batches per optimizer step.
        sync_with_dataloader: whether the last batch of the loader in use is a boundary and resets the count.
        sync_each_batch: whether gradients are reduced over the ranks in every micro-batch. This saves memory if the
            model is sharded, and has no effect with a single rank.
        adjust_scheduler: an Accelerate setting, which is stored but has no effect.
        loaders: the process's loaders, shared by all its Accelerators.
    """

    def __init__(
        self,
        steps: int,
        *,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
        adjust_scheduler: bool = True,
        loaders: LoadersInUse | None = None,
    ) -> None:
        self.steps = steps
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_each_batch = sync_each_batch
        self.adjust_scheduler = adjust_scheduler
        self.loaders = LoadersInUse() if loaders is None else loaders
        self.is_boundary = True
        self.checked_loss = False
        """Whether the first loss has been checked, to warn a script that divides the loss itself."""
        self.inside = 0
        """Number of micro-batch contexts that have been entered and not left yet."""
        self._done: dict[int, int] = {}

    def set_steps(self, steps: int) -> None:
        """Set the number of micro-batches per step.

        Raises:
            RuntimeMisuse: ``steps`` is not an integer of at least 1.
        """
        if not isinstance(steps, int) or steps < 1:
            raise RuntimeMisuse(f"gradient_accumulation_steps={steps!r} must be a whole number of at least 1")
        self.steps = steps

    def steps_per_epoch(self, loaders: Sequence[Any]) -> int | None:
        """Number of optimizer steps in one pass over the first loader; None if there is no loader or its length
        is unknown."""
        try:
            batches = len(loaders[0]) if loaders and isinstance(loaders[0], Sized) else None
        except TypeError:  # an iterable dataset
            batches = None
        return None if batches is None else -(-batches // self.steps)

    def begin_micro_batch(self, key: int = 0) -> None:
        """Count a micro-batch. Each ``key`` has its own count, because the two models of a GAN accumulate
        independently."""
        done = self._done.get(key, 0) + 1
        source = self.loaders.current
        if done >= self.steps or (source is not None and source.at_last_batch and self.sync_with_dataloader):
            self.is_boundary = True
            self._done[key] = 0
        else:
            self.is_boundary = False
            self._done[key] = done

    def reset(self) -> None:
        """Reset the count of micro-batches, and the record of loaders in use."""
        self._done.clear()
        self.is_boundary = True
        self.loaders.clear()


class MicroBatch:
    """Context of one micro-batch: gradients of ``models`` are reduced only if an optimizer step follows, or if
    ``sync_each_batch`` is set.

    Args:
        others: accumulations of other Accelerators, whose ``is_boundary`` is set to that of ``accumulation``.
    """

    __slots__ = ("_accumulation", "_held", "_models", "_others")

    def __init__(
        self, accumulation: Accumulation, models: tuple[nn.Module, ...], others: tuple[Accumulation, ...] = ()
    ) -> None:
        self._accumulation = accumulation
        self._models = models
        self._others = others
        self._held: Sequence[NoSync] = ()

    def __enter__(self) -> None:
        accumulation, models = self._accumulation, self._models
        accumulation.begin_micro_batch(id(models[0]) if models else 0)
        accumulation.inside += 1
        for other in self._others:
            other.is_boundary = accumulation.is_boundary
            other.inside += 1
        if models and not (accumulation.is_boundary or accumulation.sync_each_batch):
            entered = []
            for model in models:
                held = no_sync(model)
                if held is not NO_REDUCTION:
                    held.__enter__()
                    entered.append(held)
            self._held = entered

    def __exit__(self, *error: object) -> None:
        self._accumulation.inside -= 1
        for other in self._others:
            other.inside -= 1
        for held in self._held:
            held.__exit__(*error)


def samples_per_step(accumulation: Accumulation, group: RankGroup) -> str | None:
    """Text for the log: the number of samples per optimizer step. None if the batch size of the loader in use is
    unknown."""
    loader = accumulation.loaders.current
    try:
        total = getattr(loader, "total_batch_size", None)
    except TypeError:  # batches without a fixed size
        return None
    if total is None:
        size = getattr(loader, "batch_size", None)
        if size is None:
            size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        total = size * group.data_size if isinstance(size, int) else None
    if not isinstance(total, int) or total < 1:
        return None
    ranks, steps = group.data_size, accumulation.steps
    parts = [f"{total // ranks}"]
    if ranks > 1:
        parts.append(f"{ranks} ranks")
    if steps > 1:
        parts.append(f"{steps} micro-batches")
    made = f" ({' × '.join(parts)})" if len(parts) > 1 else ""
    return f"{total * steps} samples per step{made}"


def warn_if_divided(loss: Any, steps: int) -> bool:
    """Warn if the script has divided the loss by ``steps``: ``backward`` divides the loss again, as in Accelerate.

    Call this function once, before ``backward`` divides. Inspecting the autograd graph takes some microseconds and does
    not synchronise with a GPU.

    Returns:
        Whether a division was found.
    """
    if steps < 2 or not isinstance(loss, torch.Tensor) or not _is_divided(loss.grad_fn, steps):
        return False
    warnings.warn(
        f"{call_site()}: this loss has already been divided by {steps}, and backward() divides it again by "
        f"gradient_accumulation_steps={steps}, so gradients are {steps} times too small. "
        "Remove the division from the script",
        stacklevel=2,
    )
    return True


def _is_divided(node: Any, steps: int) -> bool:
    while node is not None and node.name() in _PASSED_THROUGH:
        node = node.next_functions[0][0]
    if node is None or node.name() not in ("DivBackward0", "MulBackward0"):
        return False
    if sum(source is not None for source, _ in node.next_functions) != 1:
        return False  # both operands are results of computations
    # A scalar operand is a tensor on the CPU. A tensor on a GPU was computed, and reading it would synchronise.
    factor = node._saved_other if node.name() == "DivBackward0" else _scalar(node)
    if not isinstance(factor, torch.Tensor) or factor.device.type != "cpu" or factor.numel() != 1:
        return False
    value = float(factor)
    return value == steps if node.name() == "DivBackward0" else abs(value * steps - 1) < 1e-6


def _scalar(node: Any) -> Any:
    """The constant operand of a multiplication."""
    return node._saved_other if node._saved_other is not None else node._saved_self
