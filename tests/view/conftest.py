from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.rank_records import Progress
from hpcaccel.core.records import AttemptEnd, AttemptStart, RunRecord, to_dict
from hpcaccel.core.run_dir import RunDir


class HandMade:
    """A run directory with files as the node and the ranks write them."""

    def __init__(self, path: Path, *, name: str = "gpt") -> None:
        self.run = RunDir(path)
        self.run.create()
        record = RunRecord(
            run_id=self.run.run_id, name=name, backend="local", cluster="local", job_ids=["local-1"], created=1000.0
        )
        write_json(self.run.record, to_dict(record))

    def start(self, attempt: int, **facts: Any) -> None:
        self.run.attempt(attempt).mkdir()
        usual = {"attempt": attempt, "time": 1000.0 * attempt, "job_id": "local-1", "nodes": ["n1"], "ranks": 2}
        line = AttemptStart(**{**usual, **facts})
        append_line(self.run.ledger, to_dict(line))

    def progress(self, attempt: int, *, resumed_step: int = 0, total_steps: int | None = 400) -> None:
        source = f"step_{resumed_step:08d}" if resumed_step else None
        progress = Progress(resumed_step=resumed_step, resumed_from=source, total_steps=total_steps)
        write_json(self.run.progress(attempt), to_dict(progress))

    def metric(self, step: int, *, attempt: int, time: float | None = None, **values: float) -> None:
        when = 100.0 + step if time is None else time
        append_line(self.run.metrics, {"step": step, "attempt": attempt, "time": when, "epoch": 0, "values": values})

    def end(self, attempt: int, **facts: Any) -> None:
        end = AttemptEnd(**{"attempt": attempt, "time": 2000.0, "reason": "completed", "decision": "end", **facts})
        append_line(self.run.ledger, to_dict(end))

    def log(self, attempt: int, rank: int | str, text: bytes) -> None:
        with self.run.rank_log(attempt, rank).open("ab") as file:
            file.write(text)


@pytest.fixture
def hand_made(tmp_path: Path) -> HandMade:
    return HandMade(tmp_path / "runs" / "gpt" / "20261120-153012-4f2a")
