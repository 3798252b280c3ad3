"""Reading the weights of the modules that run next, in a background thread, while the current module computes.

If the modules compute on an accelerator, their weights are read and copied to it. If they compute on the CPU, their
files are only read into the page cache: a copy would take the processor time that the current module needs, and memory.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from hpcaccel.runtime.distributed import device_backend

__all__ = ["Arrived", "ReadAhead", "Reader"]

ENOUGH_BYTES = 1 << 20
"""Reading ahead stops after the module with which this is reached: at most one large module is read ahead."""


class Reader(Protocol):
    """A hook whose module's weights can be read ahead."""

    bytes: int
    """Size of the weights."""
    takes_time: bool
    """Whether the weights are in files, or will be copied to another device."""

    def target(self) -> torch.device | None:
        """The device on which the weights are used; None means where they are."""

    def read(self) -> dict[str, torch.Tensor]:
        """The weights by name, on the device."""

    def warm(self) -> None:
        """Read the files of the weights into the page cache."""


class Arrived(NamedTuple):
    """Weights that were copied to the device, and the event after which they may be used, if there is one."""

    tensors: dict[str, torch.Tensor]
    event: Any


class ReadAhead:
    """The order in which the modules of a model run, and the weights that are being read.

    The first order is the order of registration; later ones are observed. After the last module of a forward pass
    nothing is read ahead, so that no weights stay in memory between passes.
    """

    def __init__(self) -> None:
        self._next: dict[Reader, Reader] = {}
        self._registered: Reader | None = None
        self._first: Reader | None = None
        self._last: Reader | None = None
        self._pending: dict[Reader, Future[Arrived]] = {}
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy: without the weights that are being read."""
        return {**self.__dict__, "_pending": {}}

    def register(self, reader: Reader) -> None:
        """Add a reader to the order. Readers are registered in the order in which their modules will probably run."""
        if self._registered is not None:
            self._next[self._registered] = reader
        self._registered = reader

    def take(self, reader: Reader) -> dict[str, torch.Tensor]:
        """The weights of the current module that were read ahead. Waits until they have arrived."""
        if self._first is None:
            self._first = reader
        elif self._last is not None and reader is not self._first:
            self._next[self._last] = reader
        self._last = reader
        if self._process != os.getpid():  # a forked process does not have the thread
            self._process = os.getpid()
            self._pending = {}
        while self._pending and (passed := next(iter(self._pending))) is not reader:
            self._pending.pop(passed).cancel()  # the order is another one this time
        future = self._pending.pop(reader, None)
        if future is None:
            return {}
        if future.exception() is not None:
            return {}  # the weights are read again, in this thread, and the error is raised there
        arrived = future.result()
        device = reader.target()
        if arrived.event is not None and device is not None:
            stream = device_backend.module_of(device.type).current_stream(device)
            stream.wait_event(arrived.event)
            for tensor in arrived.tensors.values():
                tensor.record_stream(stream)
        return arrived.tensors

    def start(self, reader: Reader) -> None:
        """Begin to read the weights of the modules after the one that runs now."""
        total, ahead = 0, reader
        for _ in range(len(self._next)):
            found = self._next.get(ahead)
            if found is None or found is reader or found is self._first or total >= ENOUGH_BYTES:
                return
            ahead = found
            if not ahead.takes_time:
                continue
            total += ahead.bytes
            if ahead not in self._pending:
                self._pending[ahead] = _thread().submit(_read, ahead)


def _read(reader: Reader) -> Arrived:
    device = reader.target()
    if device is None or device.type == "cpu":
        reader.warm()
        return Arrived({}, None)
    if device.type not in ("cuda", "xpu"):
        return Arrived(reader.read(), None)
    # On a stream of its own, so that the copies do not wait for the computation.
    module = device_backend.module_of(device.type)
    stream = module.Stream(device=device)
    with module.stream(stream):
        tensors = reader.read()
        event = stream.record_event()
    return Arrived(tensors, event)


_threads: list[ThreadPoolExecutor] = []


def _thread() -> ThreadPoolExecutor:
    if not _threads:
        _threads.append(ThreadPoolExecutor(1, thread_name_prefix="hpcaccel-read-ahead"))
    return _threads[0]


os.register_at_fork(after_in_child=_threads.clear)
