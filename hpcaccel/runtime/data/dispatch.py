"""Batches that rank 0 reads for all ranks; each rank receives only its own part.

Each round (see ``sharding``) is a scatter of seven integers and, if there are tensors, a scatter of bytes. The tensors
of a rank's part lie in one buffer, and the receiver's tensors are views of this buffer. The layouts of the parts are
sent only if one of them has changed. Sparse and quantized tensors are sent inside the layout.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpcaccel.errors import HpcaccelError, RuntimeMisuse
from hpcaccel.runtime.data.global_batches import Announced, FillBatch, RankBatch, SliceFn, shared_out
from hpcaccel.runtime.data.sharding import Sharing
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.parallel.precision import map_tensors

__all__ = ["Dispatcher", "dispatched"]

_BATCH, _END, _ERROR, _WAIT = range(4)
_NOBODY_KNOWS = -1
"""Stands for None among the seven integers."""
_ALIGNMENT = 16
"""Alignment of tensors in the buffer, in bytes; a multiple of every dtype's size."""


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a layout: dtype, shape, and offset in the buffer in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class Dispatcher:
    """Carries out the scatters: rank 0 calls ``send``, ``wait``, ``fail`` and ``end``, the other ranks ``receive``.

    Args:
        to_device: whether to scatter the bytes between the ranks' devices and return batches there. If false, batches
            stay on the CPU.
    """

    def __init__(self, group: RankGroup, *, to_device: bool) -> None:
        self._group = group
        self._channel = group.calls or group.control
        self._device = group.device if to_device else torch.device("cpu")
        self._sent: list[bytes] = []
        self._layout: Any = None

    @property
    def reads(self) -> bool:
        """Whether this rank reads the data."""
        return self._group.rank == 0

    def begin(self) -> None:
        """Start an iteration, whose first round sends the layouts in any case."""
        self._sent, self._layout = [], None

    # -- the rank that reads ----------------------------------------------------------------------------------------

    def send(self, parts: list[RankBatch | None], last: list[bool]) -> RankBatch | None:
        """Send each rank its part, and whether this is the rank's last part. Returns this rank's own part.

        Args:
            parts: for each data rank, its part; None for a rank that gets no batch in this round.
            last: for each data rank, whether the part is its last one.
        """
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
        from hpcaccel.runtime.distributed.collectives.nested_ops import to_device

        return RankBatch(to_device(own.batch, self._device), own.samples, own.valid)

    def end(self) -> None:
        self._send_code(_END)

    def wait(self) -> None:
        """Send the receivers a message to keep waiting: without any message their collective would time out."""
        self._send_code(_WAIT)

    def fail(self, error: Exception) -> None:
        """Make the receiving ranks raise an error with the text of ``error``, which this rank raised while reading."""
        self._send_code(_ERROR)
        kind = "misuse" if isinstance(error, RuntimeMisuse) else "error"
        text = str(error) if kind == "misuse" else f"{type(error).__name__}: {error}"
        self._scatter_objects([(kind, text)] * self._group.world_size)

    def _send_code(self, code: int) -> None:
        self._scatter_head([[code, 0, 0, 0, 0, 0, 0]] * self._group.world_size)

    # -- the ranks that receive -------------------------------------------------------------------------------------

    def receive(self) -> tuple[RankBatch | None, bool] | None:
        """Returns this rank's part, and whether this is the rank's last part; None after the last round.

        Raises:
            HpcaccelError: rank 0 could not read the data. If rank 0 raised RuntimeMisuse, this rank raises it, too.
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
        return RankBatch(batch, _number(samples), _number(valid)), bool(is_last)

    # -- scatters ---------------------------------------------------------------------------------------------------

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
        # The default group of XLA has no scatter: the bytes travel between the CPUs, and _rebuild() moves the tensors.
        device = torch.device("cpu") if self._device.type == "xla" else self._device
        group = self._channel if device.type == "cpu" else None
        own = torch.empty(size, dtype=torch.uint8, device=device)
        placed = None if buffers is None else [buffer.to(device, non_blocking=True) for buffer in buffers]
        dist.scatter(own, placed, src=0, group=group)
        return own


def dispatched(
    batches: Callable[[], tuple[Iterable[Any], FillBatch]],
    dispatcher: Dispatcher,
    sharing: Sharing,
    slice_fn: SliceFn | None,
) -> Announced:
    """This rank's parts of the batches that rank 0 reads. ``batches`` is called on rank 0 only."""
    dispatcher.begin()
    if not dispatcher.reads:
        while (received := dispatcher.receive()) is not None:
            yield received
        return
    shares: Any = None
    while True:
        try:
            if shares is None:
                read, fill = batches()
                shares = shared_out(read, sharing, slice_fn=slice_fn, fill=fill)
            share = next(shares, None)
        except Exception as error:
            dispatcher.fail(error)
            raise
        if share is None:
            break
        yield dispatcher.send(*share), share[1][sharing.rank]
    dispatcher.end()


def _numbers(part: RankBatch | None) -> list[int]:
    if part is None:
        return [0, 0, 0]
    return [1, *(_NOBODY_KNOWS if number is None else number for number in (part.samples, part.valid))]


def _number(value: int) -> int | None:
    return None if value == _NOBODY_KNOWS else value


def _lay_out(batch: Any) -> tuple[Any, list[torch.Tensor], int]:
    """Returns the layout (``batch`` with slots in place of its dense tensors), a list of these tensors, and the size of
    their buffer in bytes."""
    tensors: list[torch.Tensor] = []
    size = 0

    def place(tensor: torch.Tensor) -> Any:
        nonlocal size
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.cpu()  # part of the layout, so it is pickled
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
        return buffer[slot.offset : slot.offset + count].view(slot.dtype).view(slot.shape).to(device)

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
