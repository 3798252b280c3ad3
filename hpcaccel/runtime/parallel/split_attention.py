"""Attention whose queries, keys and values are divided over ranks along the sequence.

Keys and values are gathered before an ordinary attention with the mask of this rank's queries. Torch's own kernels,
which compute while they exchange, need an accelerator; where there is one, calls are only checked and counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from hpcaccel.errors import RuntimeMisuse

__all__ = ["Block", "attention_replaced", "positions"]


@dataclass
class Block:
    """One ``with`` block of ``maybe_context_parallel``."""

    group: dist.ProcessGroup
    calls: int = 0
    """Number of attentions so far."""
    masks: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)
    """Causal masks by the length of this rank's part."""

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)


def positions(length: int, size: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Which tokens of a sequence each rank has.

    As in torch: if the length is divisible by twice the number of ranks, the sequence is cut into that many pieces, and
    each rank gets one of the first and the matching one of the last, since late tokens attend to more than early ones.

    Args:
        length: number of tokens of the whole sequence.
        size: number of ranks.

    Returns:
        Token indices, of shape (size, length / size).
    """
    tokens = torch.arange(length, device=device)
    if length % (2 * size):
        return tokens.view(size, -1)
    pieces = tokens.view(2 * size, -1)
    return torch.cat([pieces[:size], pieces[size:].flip(0)], dim=1)


@contextmanager
def attention_replaced(block: Block, *, gathers: bool) -> Iterator[None]:
    """Replace ``scaled_dot_product_attention`` by a function that checks and counts its calls.

    Args:
        gathers: whether the function gathers keys and values itself. If not, torch has replaced it before.
    """
    inner: Callable[..., torch.Tensor] = F.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        block.calls += 1
        _refuse_call(query, key, attn_mask)
        if gathers:
            return _attend(inner, block, (query, key, value), dropout_p, causal=is_causal, **options)
        return inner(query, key, value, dropout_p=dropout_p, is_causal=is_causal, **options)

    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = inner


def _refuse_call(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Raise RuntimeMisuse for an attention that cannot be distributed."""
    if mask is not None:
        raise RuntimeMisuse(
            "context parallelism supports no attention mask: each rank has only its part of it. Use is_causal=True "
            "or no mask, and pad sequences only at their ends, with labels of -100"
        )
    if query.shape[-2] != key.shape[-2]:
        raise RuntimeMisuse(
            f"context parallelism supports only self-attention: there are {query.shape[-2]} queries and "
            f"{key.shape[-2]} keys"
        )


def _attend(
    inner: Callable[..., torch.Tensor],
    block: Block,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dropout_p: float,
    *,
    causal: bool,
    **options: Any,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        inner: torch's attention.
        parts: this rank's queries, keys and values, of shape (..., tokens, width).
    """
    query, key, value = parts
    keys, values = _Gathered.apply(key, block.group), _Gathered.apply(value, block.group)  # type: ignore[no-untyped-call]
    mask = None
    if causal:
        length, device = query.shape[-2], query.device
        if (length, device) not in block.masks:
            every = positions(length * block.size, block.size, device)
            block.masks[length, device] = every[block.rank].unsqueeze(1) >= every.view(1, -1)
        mask = block.masks[length, device]
    return inner(query, keys, values, attn_mask=mask, dropout_p=dropout_p, **options)


class _Gathered(torch.autograd.Function):
    """All ranks' parts along the dimension before the last. The gradient of a part is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        found = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(found, part.contiguous(), group=group)
        return torch.cat(found, dim=-2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        dist.all_reduce(total, group=ctx.group)
        part = total.chunk(ctx.group.size(), dim=-2)[dist.get_rank(ctx.group)]
        return part.to(gradient.dtype), None
