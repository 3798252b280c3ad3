"""Where a loader is: which epoch, and how much of it all ranks together have used. Prefetched is not used."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.sampling import Order

__all__ = ["Cursor"]


class Cursor:
    """
    Args:
        order: of map-style data; None for a stream.
        generator: the user's own, from which a stream draws.
        seed: of what a stream draws from the global generators; that of map-style data is the order's.
        stride: units of a round, which all ranks use in one step.
        unit: what is counted, ``samples`` or ``batches`` (where batches differ in size).
    """

    def __init__(
        self, order: Order | None, *, stride: int, unit: str, seed: int, generator: torch.Generator | None = None
    ) -> None:
        self.order = order
        self._stream_seed = seed
        self.stride = stride
        self.unit = unit
        self.epoch = -1
        self.start = 0
        """Units that had been used before this iteration began."""
        self.rounds = 0
        """Rounds used since then."""
        self.running = False
        self.resumed = False
        self.trains = False
        """Whether optimizer steps follow its batches; such a loader ends early when the training is to finish."""
        self.step = 0
        """Optimizer steps that were done when it gave its last batch."""
        self.stream: dict[str, Any] | None = None
        """The state of a stateful stream to go on from, and how many units it had given then."""
        self.generator = generator if order is None else order.users_generator
        """The user's own, whose state is saved."""
        self._passes = 0
        self._take_up = False
        self._generator_state: Any = None
        self._sampler_state: Any = None
        self._fingerprint: list[str] = []

    @property
    def seed(self) -> int:
        """What the seeds of an epoch are made of; the same on every rank, and after a resume."""
        return self._stream_seed if self.order is None else self.order.seed

    @property
    def used(self) -> int:
        return self.start + self.rounds * self.stride

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that the next iteration is, or goes on with."""
        return self.epoch if self._take_up else self.epoch + 1

    def begin(self, *, skip: int | None = None, end: int | None = None, over: bool = False) -> int:
        """The next epoch begins, or the one goes on in whose middle the checkpoint was made. A number that tells this
        iteration from later ones.

        Args:
            skip: rounds of the epoch to leave out. In the epoch that goes on the checkpoint's place counts instead: it
                is right whatever the script has counted, and so nothing is left out twice.
            end: units after which nothing is left of an epoch, where that is known.
            over: whether an epoch of which the checkpoint has left nothing counts as done. It does in any case for a
                script that skips, which has counted its batches.
        """
        nothing_left = end is not None and self.used >= end
        self.resumed = self._take_up and not (nothing_left and (over or skip is not None))
        if self._take_up and not self.resumed and self.order is not None:
            self.order.pass_over(self.epoch)
        self._take_up = False
        if self.resumed:
            self.start = self.used
            if skip is not None and skip * self.stride != self.start:
                _warn_of_another_place(skip, self.start // self.stride)
        else:
            self.epoch += 1
            self.start = 0 if skip is None else skip * self.stride
            self.stream = None
        self.rounds = 0
        self.running = True
        self._passes += 1
        self._generator_state = self._present_generator_state()
        if self.order is not None:
            self._draw(self.order)
        return self._passes

    def _present_generator_state(self) -> torch.Tensor | None:
        return None if self.generator is None else self.generator.get_state()

    def _draw(self, order: Order) -> None:
        self._sampler_state = order.sampler_state()
        order.begin(self.epoch)
        before, self._fingerprint = self._fingerprint, order.fingerprint()
        if self.resumed and before and before != self._fingerprint:
            warnings.warn(
                f"the sampler gives another order for epoch {self.epoch} than when the checkpoint was made, so some "
                "samples come twice and some not at all. Is the dataset the same? A sampler that draws from a "
                "generator of its own can be restored if it has that as .generator, or state_dict() and "
                "load_state_dict()",
                stacklevel=4,
            )

    def is_current(self, iteration: int) -> bool:
        """Whether no later iteration has begun."""
        return self._passes == iteration

    @property
    def place(self) -> tuple[int, int]:
        """A number of this iteration, and the rounds used in it."""
        return self._passes, self.rounds

    def finish(self, iteration: int) -> None:
        """This iteration is over, or was left."""
        if self.is_current(iteration):
            self.running = False
            if self.order is not None:
                self.order.release()

    def go_to(self, epoch: int) -> None:
        """The next iteration is that of ``epoch``, from its beginning, unless it goes on in the middle of it."""
        if self.next_epoch != epoch:
            self.epoch, self.running, self._take_up = epoch - 1, False, False

    def state_dict(self, *, running: bool) -> dict[str, Any]:
        sampler = None
        if self.order is not None:
            sampler = self._sampler_state if running else self.order.sampler_state()
        return {
            "epoch": self.epoch,
            "used": self.used,
            "unit": self.unit,
            "running": running,
            "seed": self.seed,
            "generator": self._generator_state if running else self._present_generator_state(),
            "sampler": sampler,
            "order": self._fingerprint if running else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            RuntimeMisuse: the place was counted in another unit.
        """
        if state["running"] and state["used"] and state["unit"] != self.unit:
            raise RuntimeMisuse(
                f"the checkpoint was made after {state['used']} {state['unit']} of an epoch, and this loader counts "
                f"{self.unit}: it has another kind of sampler or dataset. Prepare the loader that the checkpoint is of"
            )
        self._passes += 1  # an iteration that is still open is none of this state's
        self.epoch, self.start, self.rounds = state["epoch"], state["used"], 0
        self._take_up = self.running = state["running"]
        self._fingerprint = state["order"]
        self.stream = state.get("stream")
        if self.order is None:
            # Earlier releases have kept no seed of a stream.
            self._stream_seed = self._stream_seed if state["seed"] is None else state["seed"]
        else:
            self.order.seed = state["seed"]
            self.order.load_sampler_state(state["sampler"])
        if self.generator is not None and state["generator"] is not None:
            self.generator.set_state(state["generator"])
            self._generator_state = state["generator"]


def _warn_of_another_place(skip: int, place: int) -> None:
    warnings.warn(
        f"skip_first_batches() is to leave out {skip} batches, but the checkpoint has been made after {place} of this "
        f"epoch, and the loader goes on there by itself. Leave out as many as len(loader) counts, or do not call it",
        stacklevel=4,
    )
