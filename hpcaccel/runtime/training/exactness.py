"""What speaks against calling a checkpoint bit-exact.

That is said only where it can be shown: every step took its batch from a prepared DataLoader, whose place is in the
checkpoint, and took it after the step before was over. What else a script carries from step to step cannot be seen, and
docs/checkpoints.md says so; what can be seen of it is looked for here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hpcaccel.runtime.data.open_iterators import half_read_iterators, watch_iterators
from hpcaccel.runtime.settings import Settings
from hpcaccel.runtime.training.accumulation import LoadersInUse, Source
from hpcaccel.runtime.training.script_generators import OwnGenerators
from hpcaccel.runtime.training.unsaved_buffers import UnsavedBuffers

if TYPE_CHECKING:
    from hpcaccel.runtime.checkpointing.saver import Prepared

__all__ = ["Exactness", "changes_of"]


class Exactness:
    """Watches the steps of this rank; asked at each save."""

    def __init__(self, *, settings: Settings, prepared: Prepared, in_use: LoadersInUse, device: torch.device) -> None:
        self.in_backward = False
        """Whether the save comes at a backward pass, after a forward pass that has drawn already."""
        self._deterministic = settings.deterministic
        self._prepared = prepared
        self._in_use = in_use
        self._device = device
        self._seen: dict[str, str] = {}
        """By kind what has been seen in any step, for the first time."""
        self._steps = 0
        self._has_gradients = False
        self._generators = OwnGenerators()
        self._buffers = UnsavedBuffers()
        self._begun_at: int | None = None
        """How many steps had been done at the first look at generators and buffers."""
        self._takes: dict[int, _Takes] = {}
        if self._deterministic:
            watch_iterators()

    # -- told while the training runs -------------------------------------------------------------------------------

    def begin(self) -> None:
        """The training begins, or goes on: remember where the script's generators are, and the models' buffers."""
        if self._deterministic and self._begun_at is None:
            self._begun_at = self._steps
            self._look_at_generators(begins=True)
            self._buffers.changed(self._prepared.models)

    def backward(self) -> None:
        self._has_gradients = True

    def stepped(self, step: int, epoch: int, *, first: bool = True) -> None:
        """An optimizer has stepped.

        Args:
            step: the number of steps that are done.
            first: whether it is the optimizer whose steps are counted.
        """
        self._has_gradients = False
        if not first:
            return
        self._steps += 1
        source = self._in_use.current
        if source is None or source.given_at_step != step - 1 or not self._holds(source):
            if "unfed" not in self._seen:
                self._seen["unfed"] = f"step {step} took no batch from a prepared DataLoader"
            return
        takes = self._takes.setdefault(source.identity, _Takes())
        takes.epoch = epoch
        text = takes.stepped(source)
        if text is not None:
            self._seen.setdefault("carried", text)

    def _holds(self, source: Source) -> bool:
        """Whether the loader is in the checkpoints."""
        return any(getattr(loader, "identity", None) == source.identity for loader in self._prepared.loaders)

    # -- asked at a save --------------------------------------------------------------------------------------------

    def doubts(self, step: int, epoch: int) -> list[str]:
        """Why this rank cannot promise that the training goes on from here bit by bit; empty if it can."""
        if not self._deterministic:
            return ["saved without runtime.deterministic"]
        if not self._prepared.loaders:
            return ["no prepared DataLoader gives the training its batches"]
        return list(self._found(step, epoch))

    def _found(self, step: int, epoch: int) -> Iterator[str]:
        if not self._steps:
            yield "no step has been done yet, so nothing is known of the training's batches"
        yield from self._seen.values()
        if self.in_backward:
            yield "saved at a backward pass, after its forward pass has drawn from the generators"
        if self._has_gradients:
            yield "saved between a backward pass and its optimizer step, and gradients are in no checkpoint"
        open_now = self._in_use.sources
        if any(source.given_at_step == step for source in open_now):
            yield "saved between a batch and the step that uses it, which a resume leaves out"
        if open_now and self._finished_others(epoch, {source.identity for source in open_now}):
            yield "several DataLoaders are trained on one after the other, and a resume begins with the first of them"
        for loader in self._prepared.loaders:
            if (doubt := getattr(loader, "doubt", None)) is not None:
                yield doubt
        self.begin()
        yield from self._look_at_generators()
        if changed := self._buffers.changed(self._prepared.models):
            yield f"buffers that are in no checkpoint (persistent=False) have changed: {', '.join(changed)}"
        if self._steps and self._steps == self._begun_at and (self._generators.any or self._buffers.any):
            yield "nothing is known of the generators and buffers of the script's own before its first step"
        if self._has_other_iterators():
            yield "a DataLoader that was not prepared is in the middle of its data"
        if self._device.type not in ("cpu", "cuda"):
            yield f"the random state of {self._device.type} is in no checkpoint"

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
        """Whether a loader is half read that was not prepared, nor is the inner one of a prepared loader."""
        return any(not self._is_prepared(iterator) for iterator in half_read_iterators())

    def _is_prepared(self, iterator: Any) -> bool:
        return any(loader.reads_with(iterator) for loader in self._prepared.loaders if hasattr(loader, "reads_with"))


def changes_of(loaders: Iterable[Any]) -> tuple[str, ...]:
    """How loaders read otherwise than when the checkpoint was saved that they were loaded from."""
    return tuple(dict.fromkeys(text for loader in loaders for text in getattr(loader, "changes", ())))


class _Takes:
    """How many batches of a loader the steps take."""

    def __init__(self) -> None:
        self.epoch = -1
        self._iteration = -1
        self._given = 0
        self._most = 0

    def stepped(self, source: Source) -> str | None:
        iteration, given = source.place
        begins = iteration != self._iteration
        took = given if begins else given - self._given
        self._iteration, self._given = iteration, given
        if begins:
            self._most = took
        elif took < self._most and not source.at_last_batch:
            return (
                f"the steps of an epoch took different numbers of batches ({self._most}, then {took}): one may have "
                "been carried to the next step, and is in no checkpoint, or left out"
            )
        return None
