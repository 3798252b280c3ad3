"""Making tensors equally long, on all ranks or for a number of ranks."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from hpcaccel.runtime.distributed.collectives.nested_tensors import leaves, recursively_apply, refilled
from hpcaccel.runtime.distributed.collectives.structure_text import form_of, tensor_kind

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.process_group import Group

__all__ = ["CannotPadNestedTensorWarning", "pad_across_processes", "pad_input_tensors"]


class CannotPadNestedTensorWarning(UserWarning):
    """A tensor of torch's nested layout has no single length; it stays as it is."""


def pad_across_processes(
    value: Any, group: Group, *, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Any:
    """Lengthen tensors along ``dim`` to the longest that any rank has, with ``pad_index`` behind, or before them.

    Tensors without that dimension stay as they are. Only lengths are sent.

    Raises:
        NotATensor: something else than tensors.
        RuntimeMisuse: types, numbers of dimensions or containers differ, or some ranks do not come.
    """
    tensors = leaves(value, "pad_across_processes")
    padded = [index for index, tensor in enumerate(tensors) if _has(tensor, dim)]
    if group.exchange is None:
        return value
    answers = group.exchange.call(
        "pad_across_processes",
        form=f"{form_of(value, _kind_and_dimensions)} along dim {dim}",
        data=torch.tensor([tensors[index].shape[dim] for index in padded], dtype=torch.int64).view(torch.uint8),
    )
    lengths = answers.table.contiguous().view(torch.int64).amax(0).tolist() if padded else []
    for index, length in zip(padded, lengths, strict=True):
        tensors[index] = lengthened(tensors[index], length, dim=dim, filling=pad_index, first=pad_first)
    return refilled(value, tensors)


def lengthened(
    tensor: torch.Tensor, length: int, *, dim: int = 0, filling: float = 0, first: bool = False
) -> torch.Tensor:
    """``tensor`` with ``filling`` up to ``length`` along ``dim``; itself where it is as long already."""
    missing = length - tensor.shape[dim]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    rest = tensor.new_full(shape, filling)
    return torch.cat([rest, tensor] if first else [tensor, rest], dim=dim)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Lengthen tensors of ``batch_size`` rows with zeros, so that every process gets equally many and at least one."""
    rows = num_processes * max(1, -(-batch_size // num_processes))

    def lengthen(item: torch.Tensor) -> torch.Tensor:
        return lengthened(item, rows, dim=dim)

    return recursively_apply(lengthen, tensor, error_on_other_type=True)


def _has(tensor: torch.Tensor, dim: int) -> bool:
    if tensor.is_nested:
        warnings.warn(
            "pad_across_processes leaves a nested tensor as it is: it has no single length",
            CannotPadNestedTensorWarning,
            stacklevel=4,
        )
        return False
    return -tensor.ndim <= dim < tensor.ndim


def _kind_and_dimensions(tensor: torch.Tensor) -> str:
    return f"{tensor_kind(tensor)}[{', '.join('…' * tensor.ndim)}]"
