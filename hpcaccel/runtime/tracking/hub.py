"""The trackers of one training: start, flush and finish all of them together."""

from __future__ import annotations

import atexit
import warnings
from collections import Counter
from contextlib import ExitStack
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.tracking.catalog import LOGGER_TYPE_TO_CLASS, Wanted, sort_out
from hpcaccel.runtime.tracking.general_tracker import GeneralTracker, SilentTracker
from hpcaccel.runtime.training.metrics_writer import MetricsWriter

__all__ = ["Tracking"]

_trainings: Counter[str] = Counter()
"""How often this process has started trackers, by run id: trackers record each training as a separate run."""


class Tracking:
    """The trackers selected by ``log_with``. They are started on rank 0 only.

    Args:
        trackers: list to which started trackers are appended.
        run_id: id of the run directory; None without one.
    """

    def __init__(
        self, trackers: list[GeneralTracker], metrics: MetricsWriter, *, is_main: bool, run_id: str | None
    ) -> None:
        self.wanted: list[Wanted] = []
        self._trackers = trackers
        self._metrics = metrics
        self._is_main = is_main
        self._run_id = run_id
        self._logging_dir: str | None = None
        self._left_out: set[str] = set()
        self._started: list[GeneralTracker] = []

    def want(self, log_with: Any, logging_dir: str | None) -> None:
        """Select the trackers of ``log_with`` that can be used, and warn on rank 0 about unusable trackers.

        Raises:
            RuntimeMisuse: see ``sort_out``.
        """
        self._logging_dir = logging_dir or self._logging_dir
        usable, unusable = sort_out(log_with, self._logging_dir)
        self.wanted += [item for item in usable if item not in self.wanted]
        self._left_out |= set(unusable)
        for why in unusable.values() if self._is_main else ():
            warnings.warn(why, stacklevel=4)

    def start(self, project_name: str, config: dict[str, Any] | None, init_kwargs: dict[str, Any]) -> None:
        """Start all selected trackers on rank 0, after finishing the trackers of an earlier call."""
        if not self._is_main:
            return
        self.finish()
        self._trackers.clear()
        for name in init_kwargs:
            if name not in LOGGER_TYPE_TO_CLASS and name not in self.wanted:
                known = ", ".join(LOGGER_TYPE_TO_CLASS)
                warnings.warn(f"init_kwargs[{name!r}] is ignored: no such tracker (available: {known})", stacklevel=4)
        run = self._continued_run()
        for item in self.wanted:
            tracker = item if isinstance(item, GeneralTracker) else self._make(str(item), project_name, init_kwargs)
            tracker.continued_run = run
            tracker.start()
            self._started.append(tracker)
            self._trackers.append(tracker)
            if self._metrics.resumed_step is not None:
                tracker.resumed(self._metrics.resumed_step)
        if config is not None:
            for tracker in self._trackers:
                tracker.store_init_configuration(config)
        self._metrics.listener = self
        atexit.register(self.flush)

    def get(self, name: str, *, unwrap: bool) -> Any:
        """The started tracker ``name``; a ``SilentTracker`` if it is not running on this rank.

        Args:
            unwrap: return the object of the tracker's package instead.

        Raises:
            RuntimeMisuse: trackers have started, and no selected tracker has this name.
        """
        for tracker in self._trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]
        if self._trackers and name not in self._left_out:
            names = ", ".join(tracker.name for tracker in self._trackers)
            raise RuntimeMisuse(f"get_tracker({name!r}): there is no such tracker in this training (trackers: {names})")
        if self._is_main and self.wanted and not self._trackers:
            warnings.warn(
                f"get_tracker({name!r}) was called before init_trackers(): values logged to this tracker are discarded",
                stacklevel=3,
            )
        return SilentTracker(name)

    def flush(self) -> None:
        for tracker in self._started:
            tracker.flush()

    def resumed(self, step: int) -> None:
        for tracker in self._started:
            tracker.resumed(step)

    def finish(self) -> None:
        """Finish all trackers, even if one of them raises an error."""
        atexit.unregister(self.flush)
        started, self._started = self._started, []
        with ExitStack() as stack:
            for tracker in reversed(started):
                stack.callback(tracker.finish)

    def _make(self, name: str, project_name: str, init_kwargs: dict[str, Any]) -> GeneralTracker:
        kind: Any = LOGGER_TYPE_TO_CLASS[name]
        place = (self._logging_dir,) if kind.requires_logging_directory else ()
        tracker: GeneralTracker = kind(project_name, *place, **init_kwargs.get(name, {}))
        return tracker

    def _continued_run(self) -> str | None:
        if self._run_id is None:
            return None
        _trainings[self._run_id] += 1
        count = _trainings[self._run_id]
        return self._run_id if count == 1 else f"{self._run_id}-{count}"
