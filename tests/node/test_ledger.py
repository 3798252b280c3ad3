"""When a run must end by its caps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.node.launch import Resilience
from hpcaccel.node.ledger import Ledger
from hpcaccel.records import AttemptEnd, AttemptStart
from hpcaccel.rundir import RunDir

from .conftest import RESILIENCE

LIMITS: dict[str, Any] = dict(RESILIENCE)


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (("exception",), None),
        (("exception", "exception"), "2 failures without a new checkpoint"),
        (("exception", "launch"), None),
        (("launch", "launch"), None),
        (("launch", "exception", "exception"), "2 failures without a new checkpoint"),
        (("launch", "launch", "launch"), "3 failures"),
    ],
)
def test_failures_without_a_new_checkpoint(tmp_path: Path, classes: tuple[str, ...], words: str | None) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    ledger = Ledger.read(run)
    for attempt, name in enumerate(classes, 1):
        ledger.start(AttemptStart(attempt=attempt, time=0.0, job_id="1"))
        ledger.end(AttemptEnd(attempt=attempt, time=1.0, reason="failed", decision="restart", error_class=name))
    cap = ledger.cap(["1"], Resilience(**LIMITS))
    assert cap is None if words is None else cap is not None and words in cap
