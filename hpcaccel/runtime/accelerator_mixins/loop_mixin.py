"""The five verbs of a loop that can be stopped and resumed: see ``hpcaccel.runtime.training.loop``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcaccel.runtime.accelerator_mixins.session_mixin import Face

if TYPE_CHECKING:
    from hpcaccel.runtime.training.counters import Resumed

__all__ = ["LoopFace"]


class LoopFace(Face):
    @property
    def step(self) -> int:
        """Optimizer steps done, those before a resume included."""
        return self._session.loop.step

    def resume(self) -> Resumed:
        """Load the newest checkpoint into everything prepared: ``step``, ``epoch`` and ``path`` (None at the start)."""
        return self._session.loop.resume()

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of ``count``; calls ``resume`` if the script has not."""
        return self._session.loop.epochs(count)

    def steps(self, count: int) -> Iterator[int]:
        """The steps that are left of ``count``, for loops without epochs; calls ``resume`` if the script has not."""
        return self._session.loop.steps(count)

    def checkpoint(self) -> None:
        """Once a step: saves when due; saves and leaves by SystemExit when the training is to go on another time."""
        self._session.loop.checkpoint()

    def should_stop(self) -> bool:
        """Whether the training is to end for good; ``epochs``, ``steps`` and the training's loader then end too."""
        return self._session.loop.should_stop()
