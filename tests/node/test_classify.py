"""Tests of the classification of failures, with logs as programs, drivers and Slurm write them (tests/data/failures).

A file there is named after its cause. Logs of Python, gloo and srun were recorded; those of GPUs and of failed nodes
are written from the known messages.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.failures import CAUSES, Failure, disk_space
from hpcaccel.node.failures.classify import classify
from hpcaccel.slurm.states import JobState

ROOT = Path(__file__).parents[2]
RECORDED = sorted((ROOT / "tests" / "data" / "failures").glob("*.txt"))
TRACEBACK = "Traceback (most recent call last):\n  File 'x.py', line 1\n"
BY_THE_BATCH_STEP = {"supervisor", "component", "setup", "dependency", "preflight", "network"}
"""Causes that are not found in logs, but reported by the code that detects them."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    run.attempt(1).mkdir()
    run.supervisor_log(1).write_text(TRACEBACK + "ValueError: of the supervisor\n")
    return run


def recorded(path: Path, run: RunDir) -> tuple[dict[str, str], Failure]:
    head, *files = re.split(r"^==> (\S+) <==\n", path.read_text(), flags=re.MULTILINE)
    expected = dict(re.findall(r"^#! (\w+): (.*)$", head, re.MULTILINE))
    for name, text in zip(files[::2], files[1::2], strict=True):
        place = run.slurm_log if name == "slurm.log" else run.attempt(1) / name
        place.write_text(text.replace("{run}", str(run.path)))
    nodes = expected["nodes"].split(",")
    code = int(expected["exit_code"])
    contained = path.name.startswith("container")
    return expected, classify(run, attempt=1, exit_code=code, nodes=nodes, ranks_per_node=2, in_container=contained)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_logs_are_classified(run: RunDir, path: Path) -> None:
    expected, failure = recorded(path, run)
    assert failure.cause.name == path.name.partition(".")[0], failure
    assert expected["says"] in failure.detail
    assert failure.nodes == [node for node in expected.get("blamed", "").split(",") if node]


def test_every_cause_has_a_recorded_log() -> None:
    assert {row.name for row in CAUSES} == {path.name.partition(".")[0] for path in RECORDED} | BY_THE_BATCH_STEP


@pytest.mark.parametrize(
    ("logs", "exit_code", "kind", "sentence"),
    [
        ({0: TRACEBACK + "ValueError: no"}, 1, "exception", "rank 0: ValueError: no"),
        ({0: f"[rank0]: {TRACEBACK}[rank0]: pkg.MyError: bad"}, 1, "exception", "rank 0: pkg.MyError: bad"),
        (
            {0: TRACEBACK + "RuntimeError: gloo: Connection closed by peer", 13: TRACEBACK + "KeyError: 'lr'"},
            1,
            "exception",
            "rank 13: KeyError: 'lr'",
        ),
        ({0: TRACEBACK + "    raise NotGood(1)\npkg.NotGood: 1"}, 1, "exception", "rank 0: pkg.NotGood: 1"),
        ({0: TRACEBACK + "    raise NotGood(1)\nNotGood"}, 1, "exception", "rank 0: NotGood"),
        ({0: "all is well"}, 137, "killed", "Killed"),
        ({0: "all is well"}, 161, "killed", "Signal 33"),
        ({0: "usage: x\nx: error: no"}, 2, "user_mistake", "the program exited with code 2: x: error: no"),
        ({0: TRACEBACK + "KeyError: 'lr'"}, 3, "exception", "rank 0: KeyError: 'lr'"),
        ({}, 7, "exit", "the program exited with code 7"),
    ],
)
def test_failure_is_classified_by_rank_logs_and_exit_code(
    run: RunDir, logs: dict[int, str], exit_code: int, kind: str, sentence: str
) -> None:
    for rank, text in logs.items():
        run.rank_log(1, rank).write_text(text + "\n")
    failure = classify(run, attempt=1, exit_code=exit_code)
    assert (failure.cause.name, failure.detail) == (kind, sentence)


def test_rank_whose_end_was_reported_first_is_named(run: RunDir) -> None:
    run.slurm_log.write_text(
        "hpcaccel: 2026-11-21T06:53:29 attempt 1: ranks: 4\n"
        "srun: error: n2: task 3: Exited with exit code 1\nsrun: error: n1: task 0: Exited with exit code 1\n"
    )
    for rank in (0, 3):
        run.rank_log(1, rank).write_text(f"{TRACEBACK}ValueError: of rank {rank}\n")
    failure = classify(run, attempt=1, exit_code=1, nodes=["n1", "n2"], ranks_per_node=2)
    assert (failure.rank, failure.detail) == (3, "rank 3 on n2: ValueError: of rank 3")


@pytest.mark.parametrize(
    ("logs", "rank"),
    [
        ({0: "RuntimeError: gloo: Connection closed by peer", 1: "RuntimeError: gloo: Connection reset"}, None),
        ({0: "RuntimeError: gloo: other calls, and rank 1 differs: save"}, 1),
    ],
)
def test_rank_that_misses_another_one_is_not_at_fault(run: RunDir, logs: dict[int, str], rank: int | None) -> None:
    for number, text in logs.items():
        run.rank_log(1, number).write_text(f"{TRACEBACK}{text}\n")
    assert classify(run, attempt=1, exit_code=1).rank == rank


@pytest.mark.parametrize(("how", "kind"), [("Killed", "killed"), ("Exited with exit code 7", "exit")])
def test_end_of_a_local_rank_is_classified(run: RunDir, how: str, kind: str) -> None:
    run.slurm_log.write_text(f"hpcaccel: 2026-11-21T06:53:29 attempt 1: ranks: 4\nhpcaccel: 2026 rank 2: {how}\n")
    failure = classify(run, attempt=1, exit_code=137, nodes=["localhost"], ranks_per_node=4)
    assert (failure.cause.name, failure.rank) == (kind, 2)


ENROOT = "[INFO] Extracting squashfs filesystem...\n\n[ERROR] No such file or directory: /images/gpt.sqsh\n"
STEP_ENDED = "slurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT 2026-11-22T15:14:07 ***\n"


@pytest.mark.parametrize(
    ("log", "in_container", "kind"),
    [
        (ENROOT, True, "container"),
        (ENROOT + STEP_ENDED, True, "container"),
        (ENROOT, False, "exit"),
        ("[ERROR] Command not found: ffmpeg\n", False, "exit"),
        ("reading the data\n[ERROR] No such file or directory: data/train\n", True, "exit"),
    ],
)
@pytest.mark.parametrize("in_slurms_log", [False, True])
def test_error_line_of_a_program_is_no_container_failure(
    run: RunDir, log: str, in_container: bool, kind: str, in_slurms_log: bool
) -> None:
    if in_slurms_log and "reading" in log:
        run.rank_log(1, 0).write_text("reading the data\n")
    place = run.slurm_log if in_slurms_log else run.rank_log(1, 0)
    place.write_text(f"hpcaccel: 2026-11-22T15:14:05 attempt 1: ranks: 4\n{log}" if in_slurms_log else log)
    assert classify(run, attempt=1, exit_code=1, in_container=in_container).cause.name == kind


@pytest.mark.parametrize(
    ("error", "unwritable", "kind"),
    [
        ("[Errno 13] Permission denied: '/data/checkpoints/base.pt'", False, "exception"),
        ("[Errno 13] Permission denied: '/data/checkpoints/base.pt'", True, "unwritable"),
        ("[Errno 30] Read-only file system: '/data/checkpoint.pt'", False, "io_error"),
        ("[Errno 13] Permission denied: '{run}/checkpoints/step_00000007'", False, "unwritable"),
    ],
)
def test_cause_is_unwritable_only_for_the_run_directory(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, error: str, unwritable: bool, kind: str
) -> None:
    found = disk_space.DiskShortage("unwritable", "cannot write") if unwritable else None
    monkeypatch.setattr(disk_space, "shortage", lambda *_, **__: found)
    run.rank_log(1, 0).write_text(f"{TRACEBACK}OSError: {error.format(run=run.path)}\n")
    failure = disk_space.explained_by_room(run, classify(run, attempt=1, exit_code=1))
    assert failure.cause.name == kind


@pytest.mark.parametrize(("below", "told"), [("  a\n  b\nstep 5 loss 0.1", " a; b"), ("step 5 loss 0.1", "")])
def test_exception_message_continues_only_in_indented_lines(run: RunDir, below: str, told: str) -> None:
    run.rank_log(1, 0).write_text(f"{TRACEBACK}ValueError: these:\n{below}\n")
    assert classify(run, attempt=1, exit_code=1).detail == f"rank 0: ValueError: these:{told}"


def test_out_of_memory_in_accounting_explains_a_kill(run: RunDir) -> None:
    failure = classify(run, attempt=1, exit_code=137, step_state=JobState.OUT_OF_MEMORY)
    assert failure.cause.name == "host_out_of_memory"


def test_docs_page_shows_the_table_of_causes() -> None:
    page = (ROOT / "docs" / "failures.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    words = {"restart": "restart", "requeue": "requeue", "exclude": "exclude", "end": "end"}
    shown = [(row.name, row.meaning, words[row.follows], row.advice) for row in CAUSES]
    assert [(name, meaning, follows, advice.strip()) for name, meaning, follows, advice in rows] == shown


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("srun: error: n1: task 0: Exited with exit code 1\n", "exception"),
        ("srun: error: n1: task 0: Killed\n", "hang"),
    ],
)
def test_rank_that_exited_is_not_classified_as_hanging(run: RunDir, said: str, kind: str) -> None:
    """An exited rank is silent, and seems to hang if the hang timeout is shorter than srun's wait for the others."""
    write_json(run.attempt(1) / "hang.json", {"culprit_rank": 0, "node": "n1", "why": "rank 0 is silent"})
    run.slurm_log.write_text(f"{said}srun: launch/slurm: _step_signal: Terminating StepId=163.1\n")
    (run.attempt(1) / "0.log").write_text(TRACEBACK + "ValueError: no")
    failure = classify(run, attempt=1, exit_code=1, nodes=["n1"], ranks_per_node=1)
    assert failure.cause.name == kind, failure
