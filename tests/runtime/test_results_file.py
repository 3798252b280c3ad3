"""``ResultsFile``: each item's result once and in order, whatever stops, kills or fails the ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import read_json
from tests.runtime.ranks import Ended, Ranks, make_run, outcome, request_stop, run_ranks

pytestmark = pytest.mark.torch

BATCHES = 17
EXPECTED = [
    {"index": number, "item": item, "result": {"length": len(item), "batch": number // 3}}
    for number, item in enumerate(f"text {number} " + "é" * (number % 5) for number in range(50))
]


def answers(file: Path, *arguments: str, size: int = 2, **options: Any) -> Ended:
    return run_ranks("answers.py", [str(file), *arguments], size=size, **options)


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def done(ended: Ended) -> int:
    """Number of batches that the ranks have begun."""
    return sum(int(number) for output in ended.outputs for number in re.findall(r"^done (\d+)", output, re.M))


def check_whole(file: Path, ended: Ended) -> None:
    assert set(ended.codes) == {0}, ended.outputs
    assert lines(file) == EXPECTED
    assert os.listdir(f"{file}.parts") == ["manifest.json"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_file_has_every_result_once_and_in_order(tmp_path: Path, size: int) -> None:
    ended = answers(tmp_path / "a.jsonl", size=size)
    check_whole(tmp_path / "a.jsonl", ended)
    assert done(ended) == BATCHES


@pytest.mark.parametrize(("rank", "count", "then"), [(1, 3, 3), (0, 1, 1), (0, 9, 2)])
def test_sigterm_to_one_rank_stops_all_and_no_batch_is_done_twice(
    tmp_path: Path, rank: int, count: int, then: int
) -> None:
    run, file = make_run(tmp_path / "run"), tmp_path / "a.jsonl"
    request_stop(run)
    stop = ("--signal", f"{rank}:{count}:SIGTERM", "--slow-rank", "1", "--pause", "0.05")
    stopped = answers(file, *stop, run=run, blocked=True)
    assert stopped.codes == [85, 85], stopped.outputs
    assert not file.exists()
    found = outcome(run) or {}
    assert (found["reason"], found["step"], found["resume"]) == ("preempted", done(stopped), True)
    assert found["checkpoint"] == f"{file}.parts"
    resumed = answers(file, size=then, run=run, attempt=2, blocked=True)
    check_whole(file, resumed)
    assert done(stopped) + done(resumed) == BATCHES
    progress = read_json(run.progress(2)) or {}
    assert (progress["resumed_step"], progress["total_steps"]) == (done(stopped), BATCHES)
    assert (outcome(run, 2) or {})["reason"] == "completed"


def test_run_that_is_to_end_for_good_leaves_its_results_for_a_later_start(tmp_path: Path) -> None:
    run, file = make_run(tmp_path / "run"), tmp_path / "a.jsonl"
    request_stop(run, then="finish")
    ended = answers(file, "--signal", "0:2:SIGTERM", "--pause", "0.05", run=run, blocked=True)
    assert ended.codes == [0, 0], ended.outputs
    assert not file.exists()
    again = answers(file)
    check_whole(file, again)
    assert done(ended) + done(again) == BATCHES


def test_stop_in_the_last_batch_changes_nothing(tmp_path: Path) -> None:
    run, file = make_run(tmp_path / "run"), tmp_path / "a.jsonl"
    request_stop(run)
    ended = answers(file, "--signal", "1:8:SIGTERM", "--slow-rank", "1", "--pause", "0.1", run=run, blocked=True)
    check_whole(file, ended)
    assert (outcome(run) or {})["reason"] == "completed"


@pytest.mark.parametrize("count", [1, 5])
def test_killed_ranks_are_resumed(tmp_path: Path, count: int) -> None:
    file = tmp_path / "a.jsonl"
    ranks = Ranks("answers.py", str(file), "--signal", f"1:{count}:SIGKILL", "--slow-rank", "0", "--pause", "5", size=2)
    first, second = ranks.processes
    assert second.wait(60) == -signal.SIGKILL
    first.kill()  # as srun does
    assert ranks.wait().codes == [-signal.SIGKILL, -signal.SIGKILL]
    resumed = answers(file, size=3)
    check_whole(file, resumed)
    assert done(resumed) == BATCHES - (count - 1)


def test_error_in_one_item_keeps_all_other_results(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    failed = answers(file, "--raise-at", "49")
    assert failed.codes == [1, 1]
    assert "ValueError: item 49 is poison" in failed.outputs[1]
    assert "RankFailed: rank 0 stopped waiting for the other ranks: a rank has failed" in failed.outputs[0]
    assert not file.exists()
    again = answers(file)
    check_whole(file, again)
    assert done(again) == 1


def test_full_disk_tears_a_line_and_the_batch_is_done_again(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    failed = answers(file, "--fill-disk")
    assert failed.codes == [1, 1]
    assert "OSError: [Errno 27]" in failed.outputs[1]
    (torn,) = (tmp_path / "a.jsonl.parts").glob("*-00001.jsonl")
    assert torn.stat().st_size == 200
    assert not torn.read_bytes().endswith(b"\n")
    whole = torn.read_bytes().count(b"\n")
    assert whole >= 1
    check_whole(file, again := answers(file, size=1))
    assert done(again) == 8 - whole


def test_rank_that_is_much_slower_than_the_others_is_waited_for(tmp_path: Path) -> None:
    ended = answers(tmp_path / "a.jsonl", "--slow-rank", "1", "--pause", "0.5", "--timeout", "2")
    check_whole(tmp_path / "a.jsonl", ended)


def test_complete_file_is_left_alone_and_a_deleted_one_is_computed_again(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    answers(file)
    before = file.stat().st_mtime_ns
    again = answers(file, size=1)
    check_whole(file, again)
    assert done(again) == 0
    assert file.stat().st_mtime_ns == before
    file.unlink()
    third = answers(file, size=1)
    check_whole(file, third)
    assert done(third) == BATCHES


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_results_are_never_mixed_with_those_of_other_settings(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    assert answers(file, "--signal", "0:2:SIGTERM", size=1).codes == [85]
    for change, message, size in (
        (["--model", "large"], "settings={'model': 'small'}, but this program has settings={'model': 'large'}", 2),
        (["--batch-size", "4"], "batch_size=3, but this program has batch_size=4", 1),
        (["--items", "49"], "items=50, but this program has items=49", 1),
    ):
        refused = answers(file, *change, size=size)
        assert refused.codes == [1] * size
        assert all(message in output for output in refused.outputs), refused.outputs
    check_whole(file, answers(file, size=1))


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("items", "rank 1 has different items than rank 0 (50 items; rank 0 has 50)"),
        ("batch_size", "rank 1 has batch_size=6, but rank 0 has batch_size=3"),
        ("settings", "rank 1 has settings={'model': 'large'}, but rank 0 has settings={'model': 'small'}"),
    ],
)
def test_ranks_with_different_arguments_are_an_error_on_all_ranks(
    tmp_path: Path, difference: str, message: str
) -> None:
    ended = answers(tmp_path / "a.jsonl", "--one-rank-differs", difference)
    assert ended.codes == [1, 1]
    assert all(message in output for output in ended.outputs), ended.outputs
    assert not os.listdir(tmp_path)  # rank 0 may be the wrong one: nothing of it is left


def test_batch_that_was_not_written_is_named(tmp_path: Path) -> None:
    ended = answers(tmp_path / "a.jsonl", "--forget", "4")
    assert ended.codes == [1, 1]
    assert all("1 of 17 batches have no results: 4" in output for output in ended.outputs), ended.outputs
    check_whole(tmp_path / "a.jsonl", answers(tmp_path / "a.jsonl"))


def alone(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "HPCACCEL_"))}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


MISTAKES = """
import hpcaccel, torch
from hpcaccel.errors import RuntimeMisuse

def refuse(call, *words):
    try:
        call()
    except RuntimeMisuse as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, (missing, str(error))
    else:
        raise AssertionError(words)

results = hpcaccel.ResultsFile("a.jsonl", ["a", "b", "c"], batch_size=2)
first, second = results.missing
refuse(lambda: results.write(first, ["x"]), "batch 0 has 2 items", "1 results")
refuse(lambda: results.write(first, "xy"), "the text 'xy'", "Pass a list")
refuse(lambda: results.write(first, [torch.ones(2), 1]), "result 0 of batch 0", "tensor.tolist()")
refuse(lambda: results.write(second, [float("nan")]), "result 0 of batch 1 (item 2)", "None")
refuse(lambda: hpcaccel.ResultsFile("b.jsonl", [object()]), "item 0 cannot be written as JSON")
refuse(lambda: hpcaccel.ResultsFile("b.jsonl", "text"), "items is 'text'", "Pass a list")
refuse(lambda: hpcaccel.ResultsFile("b.jsonl", ["a"], batch_size=0), "batch_size=0")
open("c.jsonl", "w").close()
refuse(lambda: hpcaccel.ResultsFile("c.jsonl", ["a"]), "c.jsonl exists, but", "is missing", "Move the file")
refuse(hpcaccel.stop_gate, "ResultsFile")
results.write(first, [1, 2])
results.write(second, [3])
results.merge()
more = hpcaccel.ResultsFile("d.jsonl", range(3))
for batch in more.until_stopped(more.missing):
    more.write(batch, [2 * item for item in batch.items])
more.merge()
print(open("a.jsonl").read() + open("d.jsonl").read(), end="")
"""


def test_mistakes_are_errors_and_one_program_may_write_several_files(tmp_path: Path) -> None:
    ended = alone(MISTAKES, tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(line["item"], line["result"]) for line in found] == [
        ("a", 1), ("b", 2), ("c", 3), (0, 0), (1, 2), (2, 4),
    ]  # fmt: skip


PAGE = (Path(__file__).parents[2] / "docs" / "inference.md").read_text()


@pytest.mark.parametrize(
    ("variables", "gpu"),
    [
        ({}, "0"),
        ({"LOCAL_RANK": "2"}, "2"),
        ({"SLURM_LOCALID": "3"}, "3"),
        ({"SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "7"),
        ({"SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "1"}, "1"),
        ({"SLURM_LOCALID": "0", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, "GPU-b"),
    ],
)
def test_vllm_program_of_the_page_gives_each_rank_a_gpu(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], gpu: str
) -> None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that monkeypatch removes what the program sets
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (head,) = re.findall(r"^```python\n((?:(?!```).*\n)*?)from vllm ", PAGE, re.MULTILINE)
    exec(head, {})
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu


@pytest.mark.parametrize("before", ["hpcaccel.Accelerator(cpu=True)", "hpcaccel.stop_gate()"])
def test_program_has_one_way_to_stop(tmp_path: Path, before: str) -> None:
    ended = alone(f"import hpcaccel\n{before}\nhpcaccel.ResultsFile('a.jsonl', ['a'])", tmp_path)
    assert ended.returncode == 1
    assert "RuntimeMisuse: ResultsFile: this process has" in ended.stderr
