"""``Cursor``: the position of a loader, that is, its epoch, and how many of the epoch's samples or batches all ranks
together have used. Prefetched samples do not count as used.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.sampling import Order

__all__ = ["Cursor"]


class Cursor:
    """The position of one loader. ``begin`` starts the next epoch or, after a resume, continues the saved one.

    Args:
        order: order of map-style data; None for a stream.
        generator: the user's own generator, from which a stream draws.
        seed: seed of a stream's draws from the global generators. Map-style data uses the order's seed instead.
        stride: number of units that all ranks together use in one round.
        unit: unit of the position: ``samples``, or ``batches`` if ``order.is_flat`` is false.
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
        """Position in the epoch, in units, at which this iteration starts."""
        self.rounds = 0
        """Number of rounds used in this iteration."""
        self.running = False
        self.resumed = False
        self.trains = False
        """Whether optimizer steps follow the loader's batches. Such a loader ends its iteration early when the training
        finishes."""
        self.step = 0
        """Number of optimizer steps done when the loader returned its latest batch."""
        self.stream: dict[str, Any] | None = None
        """A saved state of a stateful stream, with the number of units that the stream had returned by then."""
        self.generator = generator if order is None else order.users_generator
        """The user's generator, whose state is saved in checkpoints; None if there is none."""
        self._passes = 0
        self._continues = False
        self._generator_state: Any = None
        self._sampler_state: Any = None
        self._fingerprint: list[str] = []

    @property
    def seed(self) -> int:
        """The number from which each epoch's seeds are derived; the same on every rank and after a resume."""
        return self._stream_seed if self.order is None else self.order.seed

    @property
    def used(self) -> int:
        return self.start + self.rounds * self.stride

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration, unless ``begin`` finds that the checkpoint's epoch is done."""
        return self.epoch if self._continues else self.epoch + 1

    def begin(self, *, skip: int | None = None, end: int | None = None, over: bool = False) -> int:
        """Start the next epoch, or continue the one in which the checkpoint was made.

        Args:
            skip: number of rounds to skip at the start of the epoch. An epoch that is continued starts at the
                checkpoint's position instead, so that nothing is skipped twice.
            end: number of units in an epoch; None if unknown.
            over: whether an epoch that was complete in the checkpoint counts as done. With ``skip`` it always does.

        Returns:
            The number of this iteration.
        """
        nothing_left = end is not None and self.used >= end
        self.resumed = self._continues and not (nothing_left and (over or skip is not None))
        if self._continues and not self.resumed and self.order is not None:
            self.order.pass_over(self.epoch)
        self._continues = False
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
                f"the sampler's order for epoch {self.epoch} differs from the order in the checkpoint, so samples may "
                "be repeated or skipped. Check that the dataset is the same. A sampler with its own generator can be "
                "restored if it has a generator attribute, or state_dict() and load_state_dict()",
                stacklevel=4,
            )

    def is_current(self, iteration: int) -> bool:
        """Whether no later iteration has started, and no state has been loaded since ``iteration`` started."""
        return self._passes == iteration

    @property
    def place(self) -> tuple[int, int]:
        """The number of this iteration, and how many rounds were used in it."""
        return self._passes, self.rounds

    def finish(self, iteration: int) -> None:
        """End this iteration, if it is current."""
        if self.is_current(iteration):
            self.running = False
            if self.order is not None:
                self.order.release()

    def go_to(self, epoch: int) -> None:
        """Make ``epoch`` the next epoch. If it is the epoch to be continued, it starts at the checkpoint's position."""
        if self.next_epoch != epoch:
            self.epoch, self.running, self._continues = epoch - 1, False, False

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
        """Restore a position from ``state_dict``.

        Raises:
            RuntimeMisuse: the position was saved in the middle of an epoch, and in another unit.
        """
        if state["running"] and state["used"] and state["unit"] != self.unit:
            raise RuntimeMisuse(
                f"the checkpoint was saved {state['used']} {state['unit']} into an epoch, but this loader counts "
                f"{self.unit}: it has a different kind of sampler or dataset than the saved loader. Prepare the same "
                "kind of loader as when the checkpoint was saved"
            )
        self._passes += 1  # an iteration in progress is no longer current: it does not use the loaded state
        self.epoch, self.start, self.rounds = state["epoch"], state["used"], 0
        self._continues = self.running = state["running"]
        self._fingerprint = state["order"]
        self.stream = state.get("stream")
        if self.order is None:
            # Earlier releases did not save a stream's seed.
            self._stream_seed = self._stream_seed if state["seed"] is None else state["seed"]
        else:
            self.order.seed = state["seed"]
            self.order.load_sampler_state(state["sampler"])
        if self.generator is not None and state["generator"] is not None:
            self.generator.set_state(state["generator"])
            self._generator_state = state["generator"]


def _warn_of_another_place(skip: int, place: int) -> None:
    warnings.warn(
        f"skip_first_batches(num_batches={skip}) skips nothing: the checkpoint was saved after {place} batches of this "
        "epoch, and the loader resumes there by itself. Remove the call, or count the loader's batches, as "
        "len(loader) does",
        stacklevel=4,
    )
