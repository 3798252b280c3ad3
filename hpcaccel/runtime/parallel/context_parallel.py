"""Context parallelism: each rank of a group has a part of every sequence, and attention sees all parts.

On accelerators this is torch's own ``context_parallel``, whose attention exchanges keys and values while it computes.
It has no kernels for CPUs. There, the same division of the sequences is done here, and ``split_attention`` replaces
attention.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallel.split_attention import Block, attention_replaced, positions
from hpcaccel.runtime.parallelism_config import TorchContextParallelConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["adapt_model", "context_parallel"]

logger = logging.getLogger(__name__)

_ADAPTED = "_hpcaccel_context_parallel"
"""Attribute of a model that has the hooks of ``adapt_model``."""


_block: Block | None = None
"""The ``with`` block that is running."""


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    strategy: str | None = None,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Cut ``buffers`` to this rank's part, and distribute attention over the ranks of ``mesh``; see
    ``Accelerator.maybe_context_parallel``.

    Args:
        mesh: the context-parallel dimension.
        strategy: ``allgather`` or ``alltoall``; None stands for the environment's or the default.

    Raises:
        RuntimeMisuse: a buffer cannot be split (see ``_check``), or the blocks are nested.
    """
    global _block
    given, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept = [one for one in given if not any(one is other for other in no_restore_buffers or ())]
    _check(given, dims, no_restore_buffers or set(), mesh.size())
    if _block is not None:
        raise RuntimeMisuse("maybe_context_parallel() inside another maybe_context_parallel(): leave the first one")
    block = Block(mesh.get_group())
    on_cpu = mesh.device_type == "cpu"
    division = _divided(given, dims, block, kept) if on_cpu else _divided_by_torch(mesh, strategy, given, dims, kept)
    with division, attention_replaced(block, gathers=on_cpu):
        _block = block
        try:
            yield
        finally:
            _block = None
    if not block.calls:
        logger.warning(
            "maybe_context_parallel(): torch.nn.functional.scaled_dot_product_attention was not called in the block, "
            "so tokens of this rank's part did not attend to those of other ranks. Use this function for attention"
        )


def _check(buffers: list[torch.Tensor], dims: list[int], not_restored: set[torch.Tensor], size: int) -> None:
    """Check that the buffers can be cut.

    Raises:
        RuntimeMisuse: there are none; there are not as many dimensions; a buffer has no such dimension, requires a
            gradient or is not restored and not a buffer; lengths differ, or do not divide by the number of ranks.
    """
    call = "maybe_context_parallel"
    if not buffers or len(buffers) != len(dims):
        raise RuntimeMisuse(
            f"{call}(buffers=..., buffer_seq_dims=...) got {len(buffers)} buffers and {len(dims)} dimensions: pass all "
            "tensors with a sequence dimension, and this dimension of each"
        )
    if any(not any(one is buffer for buffer in buffers) for one in not_restored):
        raise RuntimeMisuse(f"{call}(no_restore_buffers=...) contains a tensor that is not in buffers")
    for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not -buffer.dim() <= dim < buffer.dim():
            raise RuntimeMisuse(
                f"{call}(): buffers[{number}] has shape {tuple(buffer.shape)} and no dimension {dim} "
                f"(buffer_seq_dims[{number}])"
            )
        if buffer.requires_grad:
            raise RuntimeMisuse(
                f"{call}(): buffers[{number}] requires a gradient, and buffers are changed in place. Pass the model's "
                "inputs, not its parameters or activations"
            )
    lengths = [buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)]
    if len(set(lengths)) > 1:
        raise RuntimeMisuse(f"{call}(): the buffers have sequences of different lengths: {lengths}")
    if lengths[0] % size or not lengths[0]:
        unit = 2 * size
        raise RuntimeMisuse(
            f"{call}(): sequences of {lengths[0]} tokens cannot be divided over {size} ranks. Pad them to "
            f"{max(1, -(-lengths[0] // unit)) * unit} tokens, a multiple of twice the number of ranks, with labels of "
            "-100 for the padding (transformers: pad_to_multiple_of)"
        )


# -- the buffers


@contextmanager
def _divided(buffers: list[torch.Tensor], dims: list[int], block: Block, kept: list[torch.Tensor]) -> Iterator[None]:
    wholes = [buffer.data for buffer in buffers]
    for buffer, dim, whole in zip(buffers, dims, wholes, strict=True):
        own = positions(whole.shape[dim], block.size, whole.device)[block.rank]
        buffer.data = whole.index_select(dim, own)
    try:
        yield
    finally:
        for buffer, whole in zip(buffers, wholes, strict=True):
            if any(buffer is one for one in kept):
                buffer.data = whole


@contextmanager
def _divided_by_torch(
    mesh: DeviceMesh, strategy: str | None, buffers: list[torch.Tensor], dims: list[int], kept: list[torch.Tensor]
) -> Iterator[None]:
    """torch's own context, which also replaces attention by a distributed one."""
    from torch.distributed.tensor.experimental import context_parallel as of_torch
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(strategy or str(TorchContextParallelConfig().cp_comm_strategy))
    not_restored = {one for one in buffers if not any(one is other for other in kept)}
    whole_dims = [dim % buffer.dim() for buffer, dim in zip(buffers, dims, strict=True)]
    with of_torch(mesh, buffers=buffers, buffer_seq_dims=whole_dims, no_restore_buffers=not_restored):
        yield


# -- models of transformers


def adapt_model(model: nn.Module) -> None:
    """Prepare a model of transformers for the block: its attention runs without a mask, which would cover only this
    rank's part, and its tokens get their positions in the whole sequence. Other models are not changed.

    Raises:
        RuntimeMisuse: its attention is not ``sdpa``, or is neither causal nor unmasked in some layers.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or hasattr(model, _ADAPTED):
        return
    config = config.get_text_config()
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in (None, "sdpa"):
        raise RuntimeMisuse(
            f"context parallelism needs attn_implementation='sdpa', and this {type(model).__name__} has "
            f"{implementation!r}. Load it with from_pretrained(..., attn_implementation='sdpa')"
        )
    by_window = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    kinds = set(getattr(config, "layer_types", None) or by_window) - {"full_attention"}
    if kinds:
        raise RuntimeMisuse(
            f"context parallelism supports causal attention over the whole sequence, but {type(model).__name__} has "
            f"layers of other kinds: {', '.join(sorted(kinds))}"
        )
    setattr(model, _ADAPTED, True)
    for name, module in model.named_modules():
        if name.endswith("self_attn") or getattr(module, "is_causal", None) is True:
            module.register_forward_pre_hook(_without_mask, prepend=True, with_kwargs=True)
    if "position_ids" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_with_positions, prepend=True, with_kwargs=True)


def _without_mask(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if _block is None or getattr(module, "is_causal", True) is False or named.get("attention_mask") is None:
        return None
    named = {**named, "attention_mask": None}
    if not hasattr(module, "is_causal"):
        named["is_causal"] = True
    return positional, named


def _with_positions(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    tokens = positional[0] if positional else named.get("input_ids")
    tokens = named.get("inputs_embeds") if tokens is None else tokens
    if _block is None or named.get("position_ids") is not None or tokens is None or len(positional) > 1:
        return None
    own = positions(tokens.shape[1] * _block.size, _block.size, tokens.device)[_block.rank]
    return positional, {**named, "position_ids": own.expand(tokens.shape[0], -1)}
