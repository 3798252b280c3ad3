"""What the script logs: rank 0 writes it to ``metrics.jsonl``, a line a call."""

from __future__ import annotations

import atexit
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from hpcaccel.runtime.training.metrics_lines import FLUSH_SECONDS, Lines, is_kept, leaves, left_out, plain

__all__ = ["Listener", "MetricsWriter", "plain"]


class Listener(Protocol):
    """Whoever keeps the same values elsewhere: told when they must be safe, and when some of them will come again."""

    def flush(self) -> None: ...

    def resumed(self, step: int) -> None: ...


class MetricsWriter:
    """Lines are kept for up to a second (see ``Lines``), and written before a checkpoint is committed, so that the
    metrics of a committed step are never lost."""

    def __init__(self, path: Path | None, *, attempt: int) -> None:
        self._lines = None if path is None else Lines(path)
        if path is not None:
            atexit.register(self.flush)  # before the lines' own
        self._attempt = attempt
        self._held: tuple[int, int, dict[str, Any]] | None = None
        self._flushed = 0.0
        self._warned = False
        self.listener: Listener | None = None
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.logged_step: int | None = None
        """The largest step that anything was logged for; part of every checkpoint."""
        self.resumed_step: int | None = None
        """The same, when the checkpoint that this process loaded was saved."""

    def write(self, values: Mapping[str, Any], *, step: int, epoch: int) -> None:
        """Log plain numbers, strings, tensors of one element, or dicts of these."""
        if self._held is not None and self._held[0] == step:
            values = {**self._held[2], **values}
            self._held = None
        self._let_go()
        self._take(values, step, epoch)
        if time.time() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def hold(self, values: Mapping[str, Any], *, step: int, epoch: int) -> None:
        """Log values of an accumulation that ends in ``step``: they are written with those of its boundary, which win
        where names are the same."""
        if self._held is not None and self._held[0] != step:
            self._let_go()
        self.count(step)
        before = {} if self._held is None else self._held[2]
        # A tensor may be added to before it is written, and reading it now would wait for the GPU.
        kept = {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        self._held = (step, epoch, {**before, **kept})

    def flush(self) -> None:
        self._let_go()
        self._flushed = time.time()
        if self._lines is not None:
            self._lines.write_out()
        if self.listener is not None:
            self.listener.flush()

    def count(self, step: int) -> None:
        self.logged_step = step if self.logged_step is None else max(step, self.logged_step)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on as a checkpoint says."""
        self.first_loss, self.last_loss = state["first_loss"], state["last_loss"]
        self.logged_step = self.resumed_step = state.get("logged_step", state["step"])
        if self.listener is not None and self.resumed_step is not None:
            self.listener.resumed(self.resumed_step)

    def _let_go(self) -> None:
        if self._held is not None:
            (step, epoch, values), self._held = self._held, None
            self._take(values, step, epoch)

    def _take(self, values: Mapping[str, Any], step: int, epoch: int) -> None:
        self.count(step)
        if self._lines is None:
            return
        kept = dict(self._kept(values))
        loss = kept.get("loss")
        if isinstance(loss, float):
            self.last_loss = loss
            self.first_loss = loss if self.first_loss is None else self.first_loss
        self._lines.add({"step": step, "attempt": self._attempt, "time": time.time(), "epoch": epoch, "values": kept})

    def _kept(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in leaves(values):
            if is_kept(value):
                yield name, value
            elif self.listener is None and not self._warned:
                self._warned = True
                warnings.warn(left_out(name, value), stacklevel=2)
