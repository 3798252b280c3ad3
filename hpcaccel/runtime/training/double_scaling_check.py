"""A loss that the script has divided by the accumulation steps itself, though ``backward`` does so, too: gradients are
too small by that factor, and nothing else tells of it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from hpcaccel.runtime.distributed.collectives.call_site import call_site

__all__ = ["warn_if_divided"]

_PASSED_THROUGH = ("ToCopyBackward0", "CloneBackward0", "ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0")
"""What a division may hide behind: the same number in another form."""


def warn_if_divided(loss: Any, steps: int) -> bool:
    """Warn of a loss that is something divided by ``steps``, or multiplied by its inverse; whether it is. It is divided
    again all the same, as in Accelerate.

    To be called before ``backward`` divides, once: looking at the graph costs some microseconds, and for a loss on a
    GPU nothing is waited for.
    """
    if steps < 2 or not isinstance(loss, torch.Tensor) or not _is_divided(loss.grad_fn, steps):
        return False
    warnings.warn(
        f"{call_site()}: this loss has been divided by {steps} already, and backward() divides by the "
        f"gradient_accumulation_steps={steps} itself, so gradients come out {steps} times too small. "
        "Leave out one of them",
        stacklevel=2,
    )
    return True


def _is_divided(node: Any, steps: int) -> bool:
    while node is not None and node.name() in _PASSED_THROUGH:
        node = node.next_functions[0][0]
    if node is None or node.name() not in ("DivBackward0", "MulBackward0"):
        return False
    if sum(source is not None for source, _ in node.next_functions) != 1:
        return False  # two computed numbers
    # The scalar of a division is a tensor on the CPU; one on a GPU is a computed one, which reading would wait for.
    factor = node._saved_other if node.name() == "DivBackward0" else _scalar(node)
    if not isinstance(factor, torch.Tensor) or factor.device.type != "cpu" or factor.numel() != 1:
        return False
    value = float(factor)
    return value == steps if node.name() == "DivBackward0" else abs(value * steps - 1) < 1e-6


def _scalar(node: Any) -> Any:
    """The factor of a multiplication that is no part of the graph."""
    return node._saved_other if node._saved_other is not None else node._saved_self
