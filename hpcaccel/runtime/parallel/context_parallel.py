"""Context parallelism: each rank of a group has a part of every sequence, and attention sees all parts.

On accelerators this is torch's own ``context_parallel``, whose attention exchanges keys and values while it computes.
It has no kernels for CPUs. There, the same division of the sequences is done here, and ``split_attention`` replaces
attention.
"""

from __future__ import annotations

import inspect
import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.collectives.gathering import CHECKED_CALLS
from hpcaccel.runtime.parallel.split_attention import Block, attention_replaced, positions
from hpcaccel.runtime.parallelism_config import TorchContextParallelConfig
from hpcaccel.runtime.rng.generators import capture, put_back

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hpcaccel.runtime.distributed.process_group import RankGroup

__all__ = ["adapt_model", "context_parallel", "share_random_states"]

logger = logging.getLogger(__name__)

_ADAPTED = "_hpcaccel_context_parallel"
"""Attribute of a model that has the hooks of ``adapt_model``."""


_block: Block | None = None
"""The ``with`` block that is running."""

_blocks = 0
"""Number of blocks of this process so far."""


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
        RuntimeMisuse: a buffer cannot be split (see ``_check``), on all ranks of ``mesh``; their buffers differ; or the
            blocks are nested. On accelerators only the first ``CHECKED_CALLS`` blocks are compared.
    """
    global _block, _blocks
    given, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept = [one for one in given if not any(one is other for other in no_restore_buffers or ())]
    if _block is not None:
        raise RuntimeMisuse("maybe_context_parallel() inside another maybe_context_parallel(): leave the first one")
    block = Block(mesh.get_group())
    on_cpu = mesh.device_type == "cpu"
    _blocks += 1
    with _agreed(given, block.group, compared=on_cpu or _blocks <= CHECKED_CALLS):
        _check(given, dims, no_restore_buffers or set(), mesh.size())
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


@contextmanager
def _agreed(buffers: list[torch.Tensor], group: dist.ProcessGroup, *, compared: bool) -> Iterator[None]:
    """Raise the error of the ``with`` block on all ranks of ``group``: the others would wait for this rank's keys.

    Args:
        compared: whether the ranks exchange their errors, and the shapes and integers of their buffers.

    Raises:
        RuntimeMisuse: the block has failed on a rank, or the ranks' buffers differ.
    """
    own = None
    try:
        yield
    except RuntimeMisuse as error:
        own = error
    reports = _from_all((None if own is None else str(own), _described(buffers)), group) if compared else []
    if own is not None:
        raise own
    for rank, (problem, described) in enumerate(reports):
        if problem is not None:
            raise RuntimeMisuse(f"rank {dist.get_global_rank(group, rank)}: {problem}")
        if described != reports[0][1]:
            first, other = dist.get_global_rank(group, 0), dist.get_global_rank(group, rank)
            shapes = [[shape for shape, _ in some] for _, some in (reports[0], reports[rank])]
            raise RuntimeMisuse(
                f"maybe_context_parallel(): ranks {first} and {other} split the same sequences, but their buffers "
                f"differ: shapes {shapes[0]} and {shapes[1]}"
                f"{', with different values' if shapes[0] == shapes[1] else ''}. Pass the loader to prepare(), and "
                "draw random numbers in the same way on both (set_seed without device_specific)"
            )


def _from_all(report: Any, group: dist.ProcessGroup) -> list[Any]:
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, report, group=group)
    return reports


def _described(buffers: list[torch.Tensor]) -> list[tuple[tuple[int, ...], int]]:
    """Shape and checksum of each buffer. Floating-point numbers may differ in the last bits: they have no checksum."""
    return [
        (tuple(one.shape), 0 if one.is_floating_point() else zlib.crc32(one.detach().cpu().numpy().tobytes()))
        for one in buffers
    ]


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


# -- random states


def share_random_states(group: RankGroup) -> None:
    """Give all ranks that work on one batch the random states of their first rank, so that a dataset that draws random
    numbers in this process returns the same samples on all of them; a collective call of all ranks."""
    if group.exchange is not None:
        states = group.exchange.objects_from_all(capture(), what="prepare")
        put_back(states[group.rank - group.rank % group.ranks_per_batch])


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
