"""Any Python objects, from one rank or from all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.collectives.exchange import Exchange

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.process_group import Group

__all__ = ["broadcast_object_list", "from_all", "from_rank", "gather_object"]


def from_all(exchange: Exchange, value: Any, *, what: str) -> list[Any]:
    """Every rank's value, by rank."""
    answers = exchange.call(what, data=_pack(value))
    return [_unpack(answers.data(rank)) for rank in range(exchange.rollcall.world_size)]


def from_rank(exchange: Exchange, value: Any, *, source: int, what: str, form: str = "") -> Any:
    """The value of rank ``source``, on every rank."""
    mine = exchange.rollcall.rank == source
    answers = exchange.call(what, form=form, data=_pack(value) if mine else None, source=source)
    return value if mine else _unpack(answers.data(source))


def gather_object(value: Any, group: Group) -> Any:
    """The items of all ranks' lists, in rank order, on every rank. Of what is no list, one item a rank; of a tensor,
    its rows. A lone rank gets back what it gives."""
    if group.exchange is None:
        return value
    return [item for part in from_all(group.exchange, value, what="gather_object") for item in _items(part)]


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple | set | frozenset):
        return value
    return value.unbind() if isinstance(value, torch.Tensor) and value.ndim else [value]


def broadcast_object_list(values: list[Any], group: Group, *, from_process: int = 0) -> list[Any]:
    """Overwrite the items of a list with those of one rank's; the same list comes back.

    Raises:
        RuntimeMisuse: there is no such rank, or the lists are not equally long.
    """
    refuse_unknown_rank(from_process, group)
    if group.exchange is not None:
        form = f"{len(values)} objects from rank {from_process}"
        values[:] = from_rank(group.exchange, values, source=from_process, what="broadcast_object_list", form=form)
    return values


def refuse_unknown_rank(rank: int, group: Group) -> None:
    """
    Raises:
        RuntimeMisuse: there is no such rank.
    """
    if not 0 <= rank < group.world_size:
        raise RuntimeMisuse(f"from_process={rank} is not a rank (0 to {group.world_size - 1})")


def _pack(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpack(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())  # noqa: S301 (what another rank of this very training has packed)
