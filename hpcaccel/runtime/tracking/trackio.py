"""Trackio, which keeps its numbers on this machine unless told otherwise. Run for real, locally."""

from __future__ import annotations

from typing import Any

from hpcaccel.runtime.tracking.general_tracker import on_main_process
from hpcaccel.runtime.tracking.resumed_tracker import ContinuingTracker
from hpcaccel.runtime.tracking.values import plain_values

__all__ = ["TrackioTracker"]


class TrackioTracker(ContinuingTracker):
    """Each attempt of a run goes on in the Trackio run of the run directory's id, unless ``kwargs`` name another.

    Args:
        run_name: Trackio's project.
        kwargs: ``trackio.init``'s own.
    """

    name = "trackio"
    main_process_only = False
    packages = ("trackio",)
    own_words = frozenset({"name", "resume"})

    @on_main_process
    def start(self) -> None:
        import trackio

        same = {"name": self.goes_on_in, "resume": "allow"} if self.goes_on_in else {}
        self.run = trackio.init(project=self.run_name, **same, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(plain_values(values), step=step, **kwargs)  # it leaves tensors out

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
