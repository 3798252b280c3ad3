"""``hpcaccel.log`` and ``hpcaccel.should_stop``: for any Python program in a run, with or without torch.

If the program has an Accelerator, these functions do the same as its methods of the same names.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import read_json
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import settings
from hpcaccel.runtime.rank_logger import this_rank
from hpcaccel.runtime.training.metrics_lines import MetricsLines, flatten, is_json_value, warning_for

__all__ = ["log", "should_stop"]

POLL_SECONDS = 1.0
"""Minimum interval between two reads of ``stop.json``."""


def log(values: Mapping[str, Any], *, step: int | None = None) -> None:
    """Log values to the run's metrics on rank 0; do nothing on other ranks.

    Outside a run, a program without an Accelerator writes values to the file ``$HPCACCEL_METRICS``; if this variable
    is not set, the values are discarded, with one warning.

    Args:
        values: numbers, strings, arrays and tensors of one element, or dicts of these.
        step: step to log the values for. Without an Accelerator the default is one more than the largest step so far,
            starting with 1. If a name has several values at one step, the last value counts.

    Raises:
        RuntimeMisuse: ``values`` is not a dict.
        RankEnvironmentError: the variables of this process contradict each other.
        OSError: the metrics file cannot be written.

    Example::

        for step in range(1, 4):
            hpcaccel.log({"loss": 1 / step}, step=step)
    """
    if not isinstance(values, Mapping):
        raise RuntimeMisuse(f'hpcaccel.log({values!r}): expected a dict of names and values, such as {{"loss": 0.5}}')
    session = _session()
    if session is None:
        _writer().write(values, step)
        return
    from hpcaccel.runtime.training.metrics_writer import log_values

    if _own is not None:
        _own.write_out()
    log_values(session, values, step, {}, session.accumulation)


def should_stop() -> bool:
    """Whether this program should end for good now, because its trial was pruned, or because a user has requested that
    the run finish or be cancelled.

    Without an Accelerator this reads the run directory, at most once a second. With several ranks, call it on one rank
    and broadcast the result, because ranks would read at different times.

    Example::

        for step in range(3):
            if hpcaccel.should_stop():
                break
    """
    session = _session()
    return _stop_poll.read() if session is None else bool(session.loop.should_stop())


def _session() -> Any | None:
    """The session of this process's Accelerators; None if there is none. Imports nothing."""
    module = sys.modules.get("hpcaccel.runtime.training_session")
    return None if module is None else module.TrainingSession.existing()


# -- writing ----------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes ``metrics.jsonl`` on rank 0, for a program without an Accelerator."""

    def __init__(self) -> None:
        self._place = settings.locate(None)
        outside = os.environ.get("HPCACCEL_METRICS")
        path = self._place.metrics or (Path(outside) if outside else None)
        self._is_main = this_rank() == 0
        self._lines = MetricsLines(path) if path is not None and self._is_main else None
        self._step = 0
        self._warned = False
        if path is None and self._is_main:
            print(
                "hpcaccel.log: this program was not started by hpcaccel, so logged values are discarded. "
                "Submit it with hpcaccel, or set HPCACCEL_METRICS to the path of a file",
                file=sys.stderr,
                flush=True,
            )

    def write(self, values: Mapping[str, Any], step: int | None) -> None:
        at = self._step + 1 if step is None else int(step)
        self._step = max(at, self._step)
        if self._lines is None:
            return
        kept = {}
        for name, value in flatten(values):
            if is_json_value(value):
                kept[name] = value
            elif not self._warned:
                self._warned = True
                warnings.warn(warning_for(name, value), stacklevel=3)
        self._lines.add({"step": at, "attempt": self._place.attempt, "time": time.time(), "values": kept})

    def write_out(self) -> None:
        if self._lines is not None:
            self._lines.write_out()


_own: _Writer | None = None


def _writer() -> _Writer:
    global _own
    if _own is None:
        _own = _Writer()
    return _own


# -- stopping ---------------------------------------------------------------------------------------------------------


@dataclass
class _StopPoll:
    """Polls ``attempts/<n>/stop.json``, which the supervisor writes."""

    last_read: float = float("-inf")
    for_good: bool = False

    def read(self) -> bool:
        if not self.for_good and time.monotonic() - self.last_read >= POLL_SECONDS:
            self.for_good = _is_stop_requested()
            self.last_read = time.monotonic()
        return self.for_good


_stop_poll = _StopPoll()


def _is_stop_requested() -> bool:
    place = settings.locate(None)
    if place.run is None:
        return False
    path = place.run.stop(place.attempt)
    try:
        if path.name not in os.listdir(path.parent):  # NFS caches the absence of a file for a while
            return False
    except FileNotFoundError:
        return False
    found = read_json(path) or {}
    return found.get("then") in ("finish", "cancel") or found.get("reason") == "pruned"
