"""``hpcaccel.log`` and ``hpcaccel.should_stop``: for programs without an Accelerator, with or without torch.

In a program that has one, both are the Accelerator's own.
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

from hpcaccel.core.run_dir import read_json
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import settings
from hpcaccel.runtime.rank_logger import this_rank
from hpcaccel.runtime.training.metrics_lines import Lines, is_kept, leaves, left_out

__all__ = ["log", "should_stop"]

LOOK_SECONDS = 1.0


def log(values: Mapping[str, Any], *, step: int | None = None) -> None:
    """Write numbers to the run's metrics, on rank 0; other ranks may call it and do nothing.

    Outside of a run they go to the file that ``$HPCACCEL_METRICS`` names, else nowhere, which is said once.

    Args:
        values: numbers, texts, arrays and tensors of one element, dicts of these.
        step: what the values belong to; default: one more than the last step of this process, 1 at first. Values of
            the same name and step: the last counts.

    Raises:
        RuntimeMisuse: ``values`` is no dict.
        RankEnvironmentError: the variables of this process contradict each other.
        OSError: the file cannot be written.
    """
    if not isinstance(values, Mapping):
        raise RuntimeMisuse(f'hpcaccel.log() takes names and numbers, {{"loss": 0.5}}, and not {values!r}')
    session = _session()
    if session is None:
        _writer().write(values, step)
        return
    from hpcaccel.runtime.training.log_values import tell

    if _own is not None:
        _own.write_out()
    tell(session, values, step, {}, session.accumulation)


def should_stop() -> bool:
    """Whether this program is to end for good now: its trial was pruned, or somebody asked the run to finish.

    The run directory is looked at once a second at most. Where several ranks work together, ask on one of them and
    tell the others: they look at different moments.
    """
    session = _session()
    return _asked.look() if session is None else bool(session.loop.should_stop())


def _session() -> Any | None:
    """The Accelerator's, where this process has one. Nothing is brought along to find that out."""
    module = sys.modules.get("hpcaccel.runtime.training_session")
    return None if module is None else module.Session.existing()


# -- writing ----------------------------------------------------------------------------------------------------------


class _Writer:
    """Rank 0's lines, as ``training.metrics`` writes them."""

    def __init__(self) -> None:
        self._place = settings.locate(None)
        outside = os.environ.get("HPCACCEL_METRICS")
        path = self._place.metrics or (Path(outside) if outside else None)
        self._is_main = this_rank() == 0
        self._lines = Lines(path) if path is not None and self._is_main else None
        self._step = 0
        self._warned = False
        if path is None and self._is_main:
            print(
                "hpcaccel.log: this program was not started by hpcaccel, so what it logs is kept nowhere. "
                "Submit it with hpcaccel, or name a file in HPCACCEL_METRICS",
                file=sys.stderr,
                flush=True,
            )

    def write(self, values: Mapping[str, Any], step: int | None) -> None:
        at = self._step + 1 if step is None else int(step)
        self._step = max(at, self._step)
        if self._lines is None:
            return
        kept = {}
        for name, value in leaves(values):
            if is_kept(value):
                kept[name] = value
            elif not self._warned:
                self._warned = True
                warnings.warn(left_out(name, value), stacklevel=3)
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


# -- asking -----------------------------------------------------------------------------------------------------------


@dataclass
class _Asked:
    """The supervisor's word in ``attempts/<n>/stop.json``."""

    last_look: float = float("-inf")
    for_good: bool = False

    def look(self) -> bool:
        if not self.for_good and time.monotonic() - self.last_look >= LOOK_SECONDS:
            self.for_good = _is_asked()
            self.last_look = time.monotonic()
        return self.for_good


_asked = _Asked()


def _is_asked() -> bool:
    place = settings.locate(None)
    if place.run is None:
        return False
    path = place.run.stop(place.attempt)
    try:
        if path.name not in os.listdir(path.parent):  # NFS remembers for a while that a name did not exist
            return False
    except FileNotFoundError:
        return False
    found = read_json(path) or {}
    return found.get("then") in ("finish", "cancel") or found.get("reason") == "pruned"
