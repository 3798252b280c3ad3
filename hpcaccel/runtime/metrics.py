"""What the script logs: rank 0 writes it to ``metrics.jsonl``, a line a call."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpcaccel.rundir import append_line
from hpcaccel.runtime.dtensors import full

__all__ = ["MetricsWriter"]

FLUSH_SECONDS = 1.0


class MetricsWriter:
    """Lines are kept for up to a second, so that quick steps do not wait for the file system, and written before a
    checkpoint is committed, so that the metrics of a committed step are never lost."""

    def __init__(self, path: Path | None, *, attempt: int) -> None:
        self._path = path
        self._attempt = attempt
        self._lines: list[dict[str, Any]] = []
        self._flushed = 0.0
        self.first_loss: float | None = None
        self.last_loss: float | None = None

    def write(self, values: Mapping[str, Any], *, step: int, epoch: int) -> None:
        """Log plain numbers, strings, or tensors of one element."""
        plain = {name: _plain(value) for name, value in values.items()}
        loss = plain.get("loss")
        if isinstance(loss, float):
            self.last_loss = loss
            self.first_loss = loss if self.first_loss is None else self.first_loss
        now = time.time()
        self._lines.append({"step": step, "attempt": self._attempt, "time": now, "epoch": epoch, "values": plain})
        if now - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        self._flushed = time.time()
        if self._path is not None and lines:
            _append(self._path, lines)


def _append(path: Path, lines: list[dict[str, Any]]) -> None:
    append_line(path, lines[0])  # closes a line that a crash tore
    if len(lines) > 1:
        data = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines[1:])
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, data.encode())
        finally:
            os.close(fd)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = full(value.detach()).item()
    elif hasattr(value, "item"):
        value = value.item()  # numpy's scalars
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
