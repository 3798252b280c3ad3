"""Misused collective calls fail with an error that names the call, its line and the missing ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.ranks import PROGRAMS, Ended, make_run, run_ranks

pytestmark = pytest.mark.torch

LINES = (PROGRAMS / "misuse.py").read_text().splitlines()
LONG = "300"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCACCEL_PATIENCE_SECONDS", "0.5")


def said(ended: Ended, rank: int = 0) -> dict[str, Any]:
    """The last JSON line that this rank printed."""
    lines = [line for line in ended.outputs[rank].splitlines() if line.startswith("{")]
    assert lines, "\n".join(ended.outputs)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def line_of(case: str, text: str) -> int:
    """The number of the first line with ``text`` in a case of the program."""
    start = next(number for number, line in enumerate(LINES) if line.startswith(f"def {case}("))
    return next(number for number, line in enumerate(LINES[start:], start + 1) if text in line)


@pytest.mark.chaos
def test_ranks_missing_from_a_gather_are_named_at_the_timeout() -> None:
    ended = run_ranks("misuse.py", ["gather_on_main", "3"], size=4)
    found = said(ended)
    assert found["error"] == "RuntimeMisuse"
    where = f"misuse.py:{line_of('gather_on_main', 'accelerator.gather')} for ranks 1-3 of 4 and reached the time limit"
    assert where in found["said"]
    assert "check whether one is inside `if is_main_process:`" in found["said"]
    assert ended.codes[0] == 1


def test_gather_fails_early_when_another_rank_has_ended() -> None:
    ended = run_ranks("misuse.py", ["gather_and_end", LONG], size=2)
    found = said(ended)
    assert "for rank 1, which has reached the end of the program" in found["said"]
    assert f"misuse.py:{line_of('gather_and_end', 'accelerator.gather')}" in found["said"]
    assert found["seconds"] < 60


def test_ranks_in_different_collectives_all_get_the_error() -> None:
    ended = run_ranks("misuse.py", ["barrier_and_gather", LONG], size=4)
    for rank in range(4):
        found = said(ended, rank)
        assert f"rank 0: wait_for_everyone at {_place('barrier_and_gather', 'wait_for_everyone')}" in found["said"]
        assert (
            f"ranks 1-3: gather of float32[2] at {_place('barrier_and_gather', 'accelerator.gather')}"
            in (found["said"])
        )
    assert ended.codes == [1] * 4


def _place(case: str, text: str) -> str:
    return f"tests/runtime/programs/misuse.py:{line_of(case, text)}"


def test_deadlock_between_a_training_step_and_a_gather_is_reported() -> None:
    ended = run_ranks("misuse.py", ["gather_and_loop", LONG], size=2)
    call = f"is waiting in gather at {_place('gather_and_loop', 'accelerator.gather')}"
    step = f"is waiting in a step of the training loop at {_place('gather_and_loop', 'accelerator.checkpoint')}"
    for rank in (0, 1):
        text = said(ended, rank)["said"]
        assert call in text
        assert step in text
    assert ended.codes == [1, 1]


def test_model_prepared_only_on_rank_0_is_reported_on_all_ranks() -> None:
    ended = run_ranks("misuse.py", ["prepare_on_main", LONG], size=2)
    for rank in (0, 1):
        text = said(ended, rank)["said"]
        assert f"rank 0: prepare of Linear with 2 parameters at {_place('prepare_on_main', 'prepare(model)')}" in text
        assert f"rank 1: prepare at {_place('prepare_on_main', 'prepare(loader)')}" in text
    assert ended.codes == [1, 1]


@pytest.mark.chaos
def test_barrier_fails_when_the_main_process_has_ended() -> None:
    ended = run_ranks("misuse.py", ["barrier_in_the_middle", LONG], size=3)
    for rank in (1, 2):
        text = said(ended, rank)["said"]
        assert "for rank 0, which has reached the end of the program" in text
    assert ended.codes == [0, 1, 1]


def test_rank_out_of_memory_stops_waiting_at_the_time_limit(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", runtime={"control_timeout_seconds": 3})
    ended = run_ranks("misuse.py", ["too_large_for_one", LONG], size=2, run=run)
    text = said(ended, 1)["said"]
    assert "rank 1 has waited 3 s in find_executable_batch_size at" in text
    assert "for rank 0 of 2 and reached the time limit" in text
    assert ended.codes == [1, 1]


@pytest.mark.parametrize("case", ["one_fails", pytest.param("one_fails_late", marks=pytest.mark.chaos)])
def test_failed_rank_and_its_error_are_named_on_all_other_ranks(case: str) -> None:
    ended = run_ranks("misuse.py", [case, LONG], size=3)
    assert "ValueError: a bug of the script's own" in ended.outputs[2]
    for rank in (0, 1):
        found = said(ended, rank)
        assert found["error"] == "RankFailed"
        assert "has failed at tests/runtime/programs/misuse.py" in found["said"], found
        assert "ValueError: a bug of the script's own" in found["said"]
    assert ended.codes == [1, 1, 1]


def test_optimizer_without_its_model_is_warned_of_once() -> None:
    ended = run_ranks("without_model.py", size=2)
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    assert "{'alone': True, 'later': False, 'compiled later': False, 'wrapped': False" in ended.outputs[0]
    warning = "no parameter of this SGD belongs to a prepared model"
    assert [output.count(warning) for output in ended.outputs] == [1, 0]
    number = (PROGRAMS / "without_model.py").read_text().split("optimizer.step()")[0].count("\n") + 1
    assert f"without_model.py:{number}: {warning}" in ended.outputs[0]


@pytest.mark.chaos
def test_late_rank_is_waited_for() -> None:
    ended = run_ranks("misuse.py", ["one_is_late", LONG], size=2)
    assert ended.result() == {"total": 2.0}
    assert ended.codes == [0, 0]
