"""``log_values`` and ``MetricsWriter``: write the values that a script logs to ``metrics.jsonl`` and to trackers."""

from __future__ import annotations

import atexit
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hpcaccel.runtime.distributed.device_mesh import full, is_dtensor
from hpcaccel.runtime.training.metrics_lines import (
    FLUSH_SECONDS,
    MetricsLines,
    flatten,
    is_json_value,
    plain,
    warning_for,
)

if TYPE_CHECKING:
    from hpcaccel.runtime.training.accumulation import Accumulation
    from hpcaccel.runtime.training_session import TrainingSession

__all__ = ["Listener", "MetricsWriter", "log_values", "plain"]


class Listener(Protocol):
    """Receives the calls ``flush`` (write buffered values now) and ``resumed`` (a checkpoint was loaded: values after
    ``step`` will be logged again)."""

    def flush(self) -> None: ...

    def resumed(self, step: int) -> None: ...


class MetricsWriter:
    """Writes ``metrics.jsonl`` on rank 0, one line per call; calls in the micro-batches of one step share a line. Lines
    are buffered for up to a second (see ``MetricsLines``) and written before a checkpoint is committed, so that no
    metrics of committed steps are lost if the rank is killed.

    Args:
        path: path of ``metrics.jsonl``; if None, nothing is written.
    """

    def __init__(self, path: Path | None, *, attempt: int) -> None:
        self._lines = None if path is None else MetricsLines(path)
        if path is not None:
            atexit.register(self.flush)  # runs before the handler of MetricsLines
        self._attempt = attempt
        self._held: tuple[int, int, dict[str, Any]] | None = None
        self._flushed = 0.0
        self._warned = False
        self.listener: Listener | None = None
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.logged_step: int | None = None
        """Largest step for which values were logged; part of every checkpoint."""
        self.resumed_step: int | None = None
        """``logged_step`` of the checkpoint that this process has loaded."""

    def write(self, values: Mapping[str, Any], *, step: int, epoch: int) -> None:
        """Log numbers, strings, tensors of one element, or dicts of these."""
        if self._held is not None and self._held[0] == step:
            values = {**self._held[2], **values}
            self._held = None
        self._write_held()
        self._add(values, step, epoch)
        if time.time() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def hold(self, values: Mapping[str, Any], *, step: int, epoch: int) -> None:
        """Log values in a micro-batch before the boundary of ``step``. They are written later, together with the values
        logged at the boundary, which take precedence."""
        if self._held is not None and self._held[0] != step:
            self._write_held()
        self.count(step)
        before = {} if self._held is None else self._held[2]
        # Copy, because the script may change the tensor; reading it now would wait for the GPU.
        kept = {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        self._held = (step, epoch, {**before, **kept})

    def flush(self) -> None:
        """Write buffered lines, and flush the listener."""
        self._write_held()
        self._flushed = time.time()
        if self._lines is not None:
            self._lines.write_out()
        if self.listener is not None:
            self.listener.flush()

    def count(self, step: int) -> None:
        """Update ``logged_step``."""
        self.logged_step = step if self.logged_step is None else max(step, self.logged_step)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the losses and ``logged_step`` from a checkpoint, and notify the listener."""
        self.first_loss, self.last_loss = state["first_loss"], state["last_loss"]
        self.logged_step = self.resumed_step = state.get("logged_step", state["step"])
        if self.listener is not None and self.resumed_step is not None:
            self.listener.resumed(self.resumed_step)

    def _write_held(self) -> None:
        if self._held is not None:
            (step, epoch, values), self._held = self._held, None
            self._add(values, step, epoch)

    def _add(self, values: Mapping[str, Any], step: int, epoch: int) -> None:
        self.count(step)
        if self._lines is None:
            return
        kept = dict(self._json_values(values))
        loss = kept.get("loss")
        if isinstance(loss, float):
            self.last_loss = loss
            self.first_loss = loss if self.first_loss is None else self.first_loss
        self._lines.add({"step": step, "attempt": self._attempt, "time": time.time(), "epoch": epoch, "values": kept})

    def _json_values(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in flatten(values):
            if is_json_value(value):
                yield name, value
            elif self.listener is None and not self._warned:
                self._warned = True
                warnings.warn(warning_for(name, value), stacklevel=2)


def log_values(
    session: TrainingSession,
    values: Mapping[str, Any],
    step: int | None,
    log_kwargs: Mapping[str, Any],
    accumulation: Accumulation,
) -> None:
    """Log values to the run's metrics and the trackers, on rank 0.

    Args:
        step: step to log the values for. By default the number of completed optimizer steps, or the current step
            between accumulation boundaries. The default is never less than the largest step logged before, so that
            scripts with their own step numbers get a single axis.
        log_kwargs: keyword arguments for each tracker's ``log``, by tracker name.
    """
    if any(map(is_dtensor, values.values())):  # ``full`` is a collective: call it before ranks other than 0 return
        values = {name: full(value) if is_dtensor(value) else value for name, value in values.items()}
    if not session.group.is_main:
        return
    loop, metrics = session.loop, session.loop.context.metrics
    in_step = not accumulation.is_boundary
    at = max(loop.step + in_step, metrics.logged_step or 0) if step is None else int(step)
    shown = None if step is None and at == 0 else at  # before the first step trackers use their own numbers
    for tracker in session.trackers:
        tracker.log(values, step=shown, **log_kwargs.get(tracker.name, {}))
    write = metrics.hold if step is None and in_step else metrics.write
    write(values, step=at, epoch=loop.epoch)
