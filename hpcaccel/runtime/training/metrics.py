"""What the script logs: rank 0 writes it to ``metrics.jsonl``, a line a call."""

from __future__ import annotations

import atexit
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from hpcaccel.rundir import append_line

__all__ = ["Listener", "MetricsWriter", "plain"]

FLUSH_SECONDS = 1.0


class Listener(Protocol):
    """Whoever keeps the same values elsewhere: told when they must be safe, and when some of them will come again."""

    def flush(self) -> None: ...

    def resumed(self, step: int) -> None: ...


class MetricsWriter:
    """Lines are kept for up to a second, so that quick steps do not wait for the file system, and written before a
    checkpoint is committed, so that the metrics of a committed step are never lost."""

    def __init__(self, path: Path | None, *, attempt: int) -> None:
        self._path = path
        if path is not None:
            atexit.register(self.flush)  # also of a program that dies of an exception: its last second tells why
        self._attempt = attempt
        self._lines: list[dict[str, Any]] = []
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
        lines, self._lines = self._lines, []
        self._flushed = time.time()
        if self._path is not None and lines:
            _append(self._path, lines)
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
        if self._path is None:
            return
        kept = dict(self._kept(values))
        loss = kept.get("loss")
        if isinstance(loss, float):
            self.last_loss = loss
            self.first_loss = loss if self.first_loss is None else self.first_loss
        self._lines.append(
            {"step": step, "attempt": self._attempt, "time": time.time(), "epoch": epoch, "values": kept}
        )

    def _kept(self, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Names and what a line of JSON can hold of their values; images and the like are for trackers."""
        for name, value in values.items():
            value = plain(value)
            if isinstance(value, Mapping):
                yield from self._kept(value, f"{prefix}{name}/")
            elif isinstance(value, bool | int | float | str) or value is None:
                yield prefix + name, value
            elif self.listener is None and not self._warned:
                self._warned = True
                warnings.warn(
                    f"log(): {prefix + name!r} is a {type(value).__name__}, and metrics.jsonl holds numbers and texts "
                    "only; trackers take more (log_with=...). Left out, and no more said about such values",
                    stacklevel=2,
                )


def plain(value: Any) -> Any:
    """A tensor or an array of one element as a number; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # numpy's
        return value.item()
    return value


def _append(path: Path, lines: list[dict[str, Any]]) -> None:
    append_line(path, lines[0])  # closes a line that a crash tore
    if len(lines) > 1:
        data = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines[1:])
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, data.encode())
        finally:
            os.close(fd)
