"""MetricsWriter: how rank 0 writes logged values to metrics.jsonl."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcaccel.core.durable_files import read_lines
from hpcaccel.runtime.training.metrics_writer import MetricsWriter, plain

pytestmark = pytest.mark.torch


class Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def flush(self) -> None:
        self.heard.append("flush")

    def resumed(self, step: int) -> None:
        self.heard.append(step)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    return [(line["step"], line["values"]) for line, _ in read_lines(path)]


def test_logged_values_become_plain_numbers_and_strings(path: Path) -> None:
    writer = MetricsWriter(path, attempt=1)
    values = {"loss": torch.tensor([0.5]), "n": np.int64(3), "note": "x", "none": None, "parts": {"a": torch.tensor(1)}}
    writer.write(values, step=1, epoch=0)
    writer.flush()
    assert lines(path) == [(1, {"loss": 0.5, "n": 3, "note": "x", "none": None, "parts/a": 1})]
    assert writer.last_loss == 0.5


def test_arrays_are_left_out_with_one_warning_unless_a_tracker_listens(path: Path) -> None:
    writer = MetricsWriter(path, attempt=1)
    said = r"'weights' has type Tensor and is not written, because metrics.jsonl stores only numbers, strings, booleans"
    with pytest.warns(UserWarning, match=said):
        writer.write({"weights": torch.ones(4), "image": np.ones((2, 2)), "x": 1}, step=1, epoch=0)
    writer.write({"weights": torch.ones(4), "x": 1}, step=2, epoch=0)
    listening = MetricsWriter(path, attempt=1)
    listening.listener = Listener()
    listening.write({"weights": torch.ones(4)}, step=3, epoch=0)
    writer.flush()
    listening.flush()
    assert lines(path) == [(1, {"x": 1}), (3, {}), (2, {"x": 1})]


def test_values_held_between_boundaries_are_merged_by_step(path: Path) -> None:
    writer = MetricsWriter(path, attempt=1)
    total = torch.tensor(1.0)
    writer.hold({"loss": total, "accuracy": 0.5}, step=1, epoch=0)
    total += 1  # the line holds the value at the time of the call
    writer.hold({"loss": 3.0, "seen": total}, step=1, epoch=0)
    total += 1
    writer.write({"loss": 4.0}, step=1, epoch=0)
    writer.hold({"accuracy": 0.6}, step=2, epoch=0)
    writer.hold({"accuracy": 0.7}, step=3, epoch=0)
    writer.flush()
    assert lines(path) == [
        (1, {"loss": 4.0, "accuracy": 0.5, "seen": 2.0}),
        (2, {"accuracy": 0.6}),
        (3, {"accuracy": 0.7}),
    ]


def test_listener_gets_flush_and_the_resumed_step(path: Path) -> None:
    writer, listener = MetricsWriter(path, attempt=1), Listener()
    writer.listener = listener
    writer.write({}, step=40, epoch=0)  # the first line of a process is written at once
    writer.hold({}, step=41, epoch=0)
    assert (listener.heard, writer.logged_step) == (["flush"], 41)
    writer.resume({"first_loss": 1.0, "last_loss": 0.5, "logged_step": 30, "step": 10})
    writer.resume({"first_loss": 1.0, "last_loss": 0.5, "step": 10})  # as in older checkpoints
    assert listener.heard == ["flush", 30, 10]
    assert (writer.resumed_step, writer.first_loss) == (10, 1.0)


def test_writer_without_a_path_does_not_read_tensors() -> None:
    writer = MetricsWriter(None, attempt=1)
    writer.write({"loss": torch.ones(1, device="meta")}, step=3, epoch=0)  # reading it would fail
    assert writer.logged_step == 3


def test_last_values_are_written_when_the_program_raises(path: Path) -> None:
    code = (
        "from pathlib import Path; from hpcaccel.runtime.training.metrics_writer import MetricsWriter\n"
        f"writer = MetricsWriter(Path({str(path)!r}), attempt=1)\n"
        "for step in range(3): writer.write({'loss': 1.0}, step=step, epoch=0)\n"
        "raise ValueError"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert [step for step, _ in lines(path)] == [0, 1, 2], done.stderr


def test_plain_leaves_arrays_and_dicts_unchanged() -> None:
    several, table = torch.ones(2), np.ones(2)
    assert plain(several) is several
    assert plain(table) is table
    assert plain({"a": 1}) == {"a": 1}
