"""``Exactness``: reasons why a checkpoint is not bit-exact.

A checkpoint contains the positions of prepared DataLoaders. It is bit-exact only if every step took its batch from a
prepared DataLoader, and took it after the previous step was over. Other state that a script carries from step to step
cannot be detected in general (see docs/checkpoints.md). This module detects loaders that are partly read, and
generators and buffers that have changed.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hpcaccel.checkpoint.device_generator import device_generator
from hpcaccel.runtime.data.loaders_in_use import BatchSource, LoadersInUse
from hpcaccel.runtime.rng.script_generators import ScriptGenerators
from hpcaccel.runtime.settings import Settings

if TYPE_CHECKING:
    from hpcaccel.runtime.checkpointing.prepared_objects import PreparedObjects

__all__ = ["Exactness", "changes_of"]


class Exactness:
    """Records the steps of this rank, and at each save lists reasons why the checkpoint is not bit-exact."""

    def __init__(
        self, *, settings: Settings, prepared: PreparedObjects, in_use: LoadersInUse, device: torch.device
    ) -> None:
        self.in_backward = False
        """Whether a save would now take place at the start of a backward pass, whose forward pass may have drawn random
        numbers."""
        self._deterministic = settings.deterministic
        self._prepared = prepared
        self._in_use = in_use
        self._device = device
        self._seen: dict[str, str] = {}
        """First reason found in any step, by kind of reason."""
        self.is_unfed = False
        """Whether ``_seen`` has a step that took no batch from a prepared loader."""
        self.steps = 0
        """Number of steps of the first prepared optimizer in this process."""
        self.has_gradients = False
        """Whether a backward pass has begun since the last step of an optimizer."""
        self._generators = ScriptGenerators()
        self._buffers = UnsavedBuffers()
        self._begun_at: int | None = None
        """Number of steps done when generators and buffers were first recorded."""
        self._takes: dict[int, _Takes] = {}
        if self._deterministic:
            watch_iterators()

    # -- recording --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Record the states of the script's generators and the models' buffers when the training starts or continues.

        Later calls do nothing.
        """
        if self._deterministic and self._begun_at is None:
            self._begun_at = self.steps
            self._look_at_generators(begins=True)
            self._buffers.changed(self._prepared.models)

    def stepped(self, step: int, epoch: int) -> None:
        """Record that the first prepared optimizer has stepped. ``step`` is the number of completed steps."""
        self.has_gradients = False
        self.steps += 1
        source = self._in_use.current
        if source is None or source.given_at_step != step - 1 or not self._holds(source):
            if not self.is_unfed:
                self.is_unfed = True
                self._seen["unfed"] = f"step {step} took no batch from a prepared DataLoader"
            return
        takes = self._takes.setdefault(source.identity, _Takes())
        takes.epoch = epoch
        text = takes.stepped(source)
        if text is not None:
            self._seen.setdefault("carried", text)

    def _holds(self, source: BatchSource) -> bool:
        """Whether the checkpoints contain the loader's position."""
        return any(getattr(loader, "identity", None) == source.identity for loader in self._prepared.loaders)

    # -- at a save --------------------------------------------------------------------------------------------------

    def doubts(self, step: int, epoch: int) -> list[str]:
        """Reasons why a resumed training may differ from an uninterrupted one; empty if none is known."""
        if not self._deterministic:
            return ["saved without runtime.deterministic"]
        if not self._prepared.loaders:
            return ["no DataLoader was prepared"]
        return list(self._found(step, epoch))

    def _found(self, step: int, epoch: int) -> Iterator[str]:
        if not self.steps:
            yield "saved before the first step, when the source of the training's batches is unknown"
        yield from self._seen.values()
        if self.in_backward:
            yield "saved during a backward pass, after its forward pass may have drawn random numbers"
        if self.has_gradients:
            yield "saved between a backward pass and its optimizer step, and gradients are not saved"
        open_now = self._in_use.sources
        if any(source.given_at_step == step for source in open_now):
            yield "saved after a batch was read and before its step: a resume skips this batch"
        if open_now and self._finished_others(epoch, {source.identity for source in open_now}):
            yield "several DataLoaders are used one after the other, and a resume starts with the first one"
        for loader in self._prepared.loaders:
            if (doubt := getattr(loader, "doubt", None)) is not None:
                yield doubt
        self.begin()
        yield from self._look_at_generators()
        if changed := self._buffers.changed(self._prepared.models):
            yield f"buffers that are not saved (persistent=False) have changed: {', '.join(changed)}"
        if self.steps and self.steps == self._begun_at and (self._generators.any or self._buffers.any):
            yield "changes to the script's generators and unsaved buffers before its first step are unknown"
        if self._has_other_iterators():
            yield "a DataLoader that was not prepared is partly read"
        if self._device.type != "cpu" and device_generator(self._device) is None:
            yield f"the random state of {self._device.type} devices is not saved"

    def _finished_others(self, epoch: int, open_now: set[int]) -> bool:
        return any(takes.epoch == epoch for source, takes in self._takes.items() if source not in open_now)

    def _look_at_generators(self, *, begins: bool = False) -> list[str]:
        models = self._prepared.models
        parts: dict[str, Any] = {f"model {number}" if number else "model": one for number, one in enumerate(models)}
        known: list[Any] = list(self._prepared.registered)
        for number, loader in enumerate(self._prepared.loaders):
            before = f"loader {number}: " if len(self._prepared.loaders) > 1 else ""
            parts |= {before + name: part for name, part in getattr(loader, "own_parts", {}).items()}
            known += getattr(loader, "saved_parts", ())
        return list(self._generators.look(parts, known, begins=begins))

    def _has_other_iterators(self) -> bool:
        """Whether there is a partly read loader that is neither prepared nor wrapped by a prepared loader."""
        return any(not self._is_prepared(iterator) for iterator in half_read_iterators())

    def _is_prepared(self, iterator: Any) -> bool:
        return any(loader.reads_with(iterator) for loader in self._prepared.loaders if hasattr(loader, "reads_with"))


def changes_of(loaders: Iterable[Any]) -> tuple[str, ...]:
    """Differences between the loaders' configuration now and when the loaded checkpoint was saved."""
    return tuple(dict.fromkeys(text for loader in loaders for text in getattr(loader, "changes", ())))


class _Takes:
    """Checks whether each step of an epoch takes the same number of batches from a loader."""

    def __init__(self) -> None:
        self.epoch = -1
        self._iteration = -1
        self._given = 0
        self._most = 0

    def stepped(self, source: BatchSource) -> str | None:
        iteration, given = source.place
        begins = iteration != self._iteration
        took = given if begins else given - self._given
        self._iteration, self._given = iteration, given
        if begins:
            self._most = took
        elif took < self._most and not source.at_last_batch:
            return (
                f"the steps of an epoch used different numbers of batches ({self._most}, then {took}): a batch may "
                "have been skipped, or kept for the next step, and a batch that is kept is not saved"
            )
        return None


_alive: weakref.WeakSet[Any] = weakref.WeakSet()
"""The DataLoader iterators that ``watch_iterators`` has recorded."""


def watch_iterators() -> None:
    """Record every DataLoader iterator that is created from now on.

    torch has no hook for the start of an iteration, and the iterator of a ``for`` or ``zip`` is not in any variable.
    Therefore the constructor of torch's iterators is wrapped; the iterators themselves are unchanged.
    """
    made: Any = _BaseDataLoaderIter.__init__
    if getattr(made, "notes_iterators", False):
        return

    @functools.wraps(made)
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        _alive.add(self)

    init.notes_iterators = True  # type: ignore[attr-defined]
    _BaseDataLoaderIter.__init__ = init  # type: ignore[method-assign]


def half_read_iterators() -> list[Any]:
    """Iterators that have returned a batch and are not known to be exhausted."""
    return [iterator for iterator in _alive if _is_half_read(iterator)]


def _is_half_read(iterator: Any) -> bool:
    if not getattr(iterator, "_num_yielded", 0) or getattr(iterator, "_finished", False):
        return False
    try:
        return bool(iterator._num_yielded < len(iterator))
    except TypeError:  # a stream has no length; with persistent workers its iterator remains after the end
        return True


class UnsavedBuffers:
    """The prepared models' ``persistent=False`` buffers, with their checksums at the first call of ``changed``.

    Checkpoints do not contain these buffers, and a new process recreates them. This is harmless if they never change,
    like masks and position tables.
    """

    def __init__(self) -> None:
        self._first: dict[str, str | None] | None = None

    @property
    def any(self) -> bool:
        return bool(self._first)

    def changed(self, models: Sequence[nn.Module]) -> list[str]:
        """Names of buffers that have changed since the first call, are new, or cannot be read."""
        now = {name: _digest(buffer) for name, buffer in _unsaved(models)}
        if self._first is None:
            self._first = now
        return [name for name, digest in now.items() if digest is None or self._first.get(name) != digest]


def _unsaved(models: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, model in enumerate(models):
        prefix = f"model {number}" if number else "model"
        for path, module in model.named_modules(prefix=prefix):
            for name in sorted(module._non_persistent_buffers_set):
                if (buffer := module._buffers.get(name)) is not None:
                    yield f"{path}.{name}", buffer


def _digest(buffer: torch.Tensor) -> str | None:
    """Checksum of the buffer's bytes on this rank; None if they cannot be read. Comparing the tensor's version instead
    would miss changes that do not increment it."""
    local: Any = buffer.to_local() if hasattr(buffer, "to_local") else buffer
    try:
        flat = local.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError):  # sparse, quantized, or without memory
        return None
    return f"{buffer.dtype} {tuple(buffer.shape)} {zlib.crc32(flat.data):08x}"
