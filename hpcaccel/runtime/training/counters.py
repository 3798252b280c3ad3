"""How far a training is, and where it was taken up again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcaccel.runtime.training.metrics_writer import MetricsWriter

__all__ = ["Counters", "Resumed"]


@dataclass(frozen=True)
class Resumed:
    """Where the training goes on: steps done, epochs done, and the checkpoint, None at the very start."""

    step: int
    epoch: int
    path: Path | None


class Counters:
    """How far the training is; part of every checkpoint."""

    def __init__(self, metrics: MetricsWriter) -> None:
        self.step = 0
        self.epoch = 0
        self.threads = torch.get_num_threads()
        """Of torch, when the checkpoint was saved that this training goes on from."""
        self._metrics = metrics

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.epoch,
            "first_loss": self._metrics.first_loss,
            "last_loss": self._metrics.last_loss,
            "logged_step": self._metrics.logged_step,
            "threads": torch.get_num_threads(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.epoch = state["step"], state["epoch"]
        self._metrics.resume(state)
        self.threads = state["threads"]
