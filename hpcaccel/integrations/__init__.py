"""Bridges for other trainers. Each module needs only the trainer that it is named after.

``StepsBetweenBatches`` is shared by the bridges for training loops that the user has written: accelerate and Fabric.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcaccel.runtime import settings
from hpcaccel.runtime.script_api import log
from hpcaccel.runtime.training.stop_gate import StopGate, stop_gate

__all__ = ["StepsBetweenBatches"]


class StepsBetweenBatches(ABC):
    """Counts optimizer steps, and reports them to the process's stop gate between two batches.

    When the script takes the next batch, the previous optimizer step is over, including scheduler and ``zero_grad``.
    Outside of a run there is no gate, and steps are only counted.

    Args:
        output_dir: where to save at a stop; the same on all ranks and nodes.
        name: name of a checkpoint; ``{step}`` is the number of optimizer steps.
        total_steps: number of optimizer steps of the whole training; None if unknown.
    """

    def __init__(self, output_dir: str | os.PathLike[str], name: str, total_steps: int | None) -> None:
        self.gate: StopGate | None = None if settings.locate(None).run is None else stop_gate()
        self._output_dir, self._name, self._total_steps = Path(output_dir), name, total_steps
        self._step = 0
        self._stepped = False
        self._begun = False
        self._trained: set[int] = set()
        """Ids of the datasets whose batches optimizer steps have followed."""

    @abstractmethod
    def save(self, path: str) -> None:
        """Save the training at ``path``. Called on all ranks."""

    @property
    def finishing(self) -> bool:
        return self.gate is not None and self.gate.should_finish

    @property
    def done(self) -> int:
        """Number of optimizer steps done, including the one since the last batch, which has not been reported yet."""
        return self._step + self._stepped

    def note_step(self, *_: Any) -> None:
        """Called after an optimizer's step."""
        self._stepped = True

    def loaded(self, step: int, checkpoint: str) -> None:
        """Called after a checkpoint was loaded that contains ``step`` steps."""
        self._step = step
        self._begin(step, checkpoint=checkpoint)

    def report(self, values: Mapping[str, Any], step: int | None) -> None:
        """Record the numbers among ``values`` as metrics of the run.

        Args:
            step: default: the number of optimizer steps done.
        """
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if numbers and self.gate is not None:
            log(numbers, step=self.done if step is None else step)

    def watch(self, batches: Iterator[Any], dataset: Any) -> Iterator[Any]:
        """Iterate over ``batches``, and report a step that was made between two of them. If the training is to end for
        good, iterators over training data return no more batches."""
        if self.finishing and id(dataset) in self._trained:
            return
        for batch in batches:
            yield batch
            if not self._stepped:
                continue
            self._trained.add(id(dataset))
            self._step_is_over()
            if self.finishing:
                return

    def _step_is_over(self) -> None:
        self._stepped = False
        self._step += 1
        gate = self.gate
        if gate is None:
            return
        self._begin(self._step - 1, checkpoint=None)
        path = self._output_dir / self._name.format(step=self._step)
        if not gate.step(self._step):
            if gate.should_save:
                self.save(str(path))
                gate.saved()
        elif gate.reason == "pruned":
            gate.leave()
        elif not gate.should_finish:
            if gate.in_time:
                self.save(str(path))
            gate.leave(checkpoint=path if gate.in_time else None)

    def _begin(self, step: int, *, checkpoint: str | None) -> None:
        if self.gate is not None and not self._begun:
            self._begun = True
            self.gate.begin(step, checkpoint=checkpoint, total_steps=self._total_steps)
