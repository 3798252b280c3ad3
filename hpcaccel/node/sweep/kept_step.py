"""Warm parents that a trial has left for the next trial in the same slot."""

from __future__ import annotations

import dataclasses

from hpcaccel.core.launch_spec import LaunchSpec, RestartPolicy
from hpcaccel.node.warm.warm_ranks import WarmStep

__all__ = ["KeptStep"]


class KeptStep:
    """The warm parents that the last trial has left, if it has left any."""

    def __init__(self) -> None:
        self.step: WarmStep | None = None
        self._launch: LaunchSpec | None = None

    def take(self, launch: LaunchSpec) -> WarmStep | None:
        """The parents, if they can start the ranks of ``launch``; otherwise they are ended."""
        if self._launch is None or _without_words(launch) != _without_words(self._launch):
            self.end()
        step, self.step = self.step, None
        return step

    def put(self, step: WarmStep | None, launch: LaunchSpec) -> None:
        self.step, self._launch = step, launch

    def end(self) -> None:
        if self.step is not None:
            self.step.end()
            self.step = None


def _without_words(launch: LaunchSpec) -> LaunchSpec:
    """``launch`` without what is passed with each start of ranks or concerns the supervisor alone."""
    return dataclasses.replace(
        launch, program=launch.program[:2], resume_args=[], after=[], watch=None, resilience=RestartPolicy()
    )
