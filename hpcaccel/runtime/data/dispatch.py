"""One rank reads for all, and sends every rank its own part only.

A round is a scatter of a few numbers, and one of bytes: all tensors of a rank's part lie in one buffer, of which the
receiver's tensors are views. What the part looks like is sent as an object, when it has changed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpcaccel.errors import HpcaccelError, RuntimeMisuse
from hpcaccel.runtime.data.global_batches import Told
from hpcaccel.runtime.distributed.process_group import Group
from hpcaccel.runtime.parallel.precision import map_tensors

__all__ = ["Dispatcher"]

_BATCH, _END, _ERROR, _WAIT = range(4)
_NOBODY_KNOWS = -1
_ALIGNMENT = 16
"""Bytes; every type's size divides it."""


@dataclass(frozen=True)
class _Slot:
    """Where a tensor was: its place among the part's tensors, its type and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class Dispatcher:
    """
    Args:
        to_device: let the bytes travel, and the batches end, on the ranks' devices.
    """

    def __init__(self, group: Group, *, to_device: bool) -> None:
        self._group = group
        self._channel = group.calls or group.control
        self._device = group.device if to_device else torch.device("cpu")
        self._sent: list[bytes] = []
        self._layout: Any = None

    @property
    def reads(self) -> bool:
        """Whether this rank is the one that reads."""
        return self._group.rank == 0

    def begin(self) -> None:
        """An iteration begins: what the parts look like is told anew."""
        self._sent, self._layout = [], None

    # -- the rank that reads ----------------------------------------------------------------------------------------

    def send(self, parts: list[Told | None], last: list[bool]) -> Told | None:
        """Give every rank its part, and say whether it is its last one; there is one for each data rank. This rank's
        own comes back."""
        copies = self._group.world_size // self._group.data_size
        spread = [part for part in parts for _ in range(copies)]
        ends = [is_last for is_last in last for _ in range(copies)]
        laid_out = [_lay_out(None if part is None else part.batch) for part in spread]
        layouts = [pickle.dumps(layout) for layout, _, _ in laid_out]
        changed = layouts != self._sent
        size = max(size for _, _, size in laid_out)
        heads = [[_BATCH, is_last, changed, size, *_numbers(part)] for part, is_last in zip(spread, ends, strict=True)]
        self._scatter_head(heads)
        if changed:
            self._scatter_objects([layout for layout, _, _ in laid_out])
            self._sent = layouts
        if size:
            buffers = [_pack(tensors, size) for _, tensors, _ in laid_out]
            self._scatter_bytes(size, buffers)
        own = spread[0]
        if own is None or self._device.type == "cpu":
            return own
        from hpcaccel.runtime.data.placement import to_device

        return Told(to_device(own.batch, self._device), own.samples, own.valid)

    def end(self) -> None:
        self._tell(_END)

    def wait(self) -> None:
        """Tell the others that it goes on later, before their patience ends."""
        self._tell(_WAIT)

    def fail(self, error: Exception) -> None:
        """Tell the others that this rank could not read on."""
        self._tell(_ERROR)
        kind = "misuse" if isinstance(error, RuntimeMisuse) else "error"
        text = str(error) if kind == "misuse" else f"{type(error).__name__}: {error}"
        self._scatter_objects([(kind, text)] * self._group.world_size)

    def _tell(self, code: int) -> None:
        self._scatter_head([[code, 0, 0, 0, 0, 0, 0]] * self._group.world_size)

    # -- the others -------------------------------------------------------------------------------------------------

    def receive(self) -> tuple[Told | None, bool] | None:
        """This rank's part, and whether it is its last one; None after the last round.

        Raises:
            HpcaccelError: the rank that reads has failed.
        """
        code = _WAIT
        while code == _WAIT:
            head = self._scatter_head(None)
            code = head[0]
        if code == _END:
            return None
        if code == _ERROR:
            kind, text = self._scatter_objects(None)
            raise RuntimeMisuse(text) if kind == "misuse" else HpcaccelError(f"rank 0 could not read the data: {text}")
        _, is_last, changed, size, exists, samples, valid = head
        if changed:
            self._layout = self._scatter_objects(None)
        buffer = self._scatter_bytes(size, None) if size else None
        if not exists:
            return None, bool(is_last)
        batch = _rebuild(self._layout, buffer, self._device)
        return Told(batch, _number(samples), _number(valid)), bool(is_last)

    # -- on the wire ------------------------------------------------------------------------------------------------

    def _scatter_head(self, heads: list[list[int]] | None) -> list[int]:
        own = torch.empty(7, dtype=torch.int64)
        rows = None if heads is None else [torch.tensor(head, dtype=torch.int64) for head in heads]
        dist.scatter(own, rows, src=0, group=self._channel)
        found: list[int] = own.tolist()
        return found

    def _scatter_objects(self, objects: list[Any] | None) -> Any:
        own: list[Any] = [None]
        dist.scatter_object_list(own, objects, src=0, group=self._channel)
        return own[0]

    def _scatter_bytes(self, size: int, buffers: list[torch.Tensor] | None) -> torch.Tensor:
        group = self._channel if self._device.type == "cpu" else None
        own = torch.empty(size, dtype=torch.uint8, device=self._device)
        placed = None if buffers is None else [buffer.to(self._device, non_blocking=True) for buffer in buffers]
        dist.scatter(own, placed, src=0, group=group)
        return own


def _numbers(part: Told | None) -> list[int]:
    if part is None:
        return [0, 0, 0]
    return [1, *(_NOBODY_KNOWS if number is None else number for number in (part.samples, part.valid))]


def _number(value: int) -> int | None:
    return None if value == _NOBODY_KNOWS else value


def _lay_out(batch: Any) -> tuple[Any, list[torch.Tensor], int]:
    """The batch with slots in place of its tensors, the tensors, and how many bytes they take."""
    tensors: list[torch.Tensor] = []
    size = 0

    def place(tensor: torch.Tensor) -> Any:
        nonlocal size
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.cpu()  # travels as an object
        tensors.append(tensor.detach())
        slot = _Slot(tensor.dtype, tuple(tensor.shape), size)
        size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        return slot

    return map_tensors(batch, place), tensors, size


def _pack(tensors: list[torch.Tensor], size: int) -> torch.Tensor:
    buffer = torch.empty(size, dtype=torch.uint8)
    offset = 0
    for tensor in tensors:
        count = tensor.numel() * tensor.element_size()
        if count:
            target = buffer[offset : offset + count].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor)
        offset += -(-count // _ALIGNMENT) * _ALIGNMENT
    return buffer


def _rebuild(layout: Any, buffer: torch.Tensor | None, device: torch.device) -> Any:
    def tensor_of(slot: _Slot) -> torch.Tensor:
        count = slot.dtype.itemsize
        for extent in slot.shape:
            count *= extent
        if not count or buffer is None:
            return torch.empty(slot.shape, dtype=slot.dtype, device=device)
        return buffer[slot.offset : slot.offset + count].view(slot.dtype).view(slot.shape)

    return _map_slots(layout, tensor_of)


def _map_slots(value: Any, function: Callable[[_Slot], torch.Tensor]) -> Any:
    if isinstance(value, _Slot):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_slots(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_map_slots(item, function) for item in value)
    if hasattr(value, "items"):
        mapped = {key: _map_slots(item, function) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(mapped)
    return value
