"""One question for everybody: how many there are, what an old answer is good for, and when a job is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import UserError
from hpcaccel.slurm import JobState, Slurm
from hpcaccel.slurm.queue_cache import CachedJob, Queue
from hpcaccel.slurm.queue_cache_files import QueueCacheFiles, cluster_key, note_change, shared_files
from hpcaccel.slurm.states import JobInfo
from tests.slurm.fake_slurm import FakeSlurm


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("HPCACCEL_QUEUE_SECONDS", raising=False)
    monkeypatch.setattr("hpcaccel.slurm.queue_cache.PAUSE_SECONDS", 0.0)
    return tmp_path


@pytest.fixture
def slurm() -> Any:
    fake = FakeSlurm()
    for job_id in ("1", "2", "46_3"):
        fake.jobs[job_id] = JobInfo(job_id=job_id, state=JobState.RUNNING)
    return fake


@pytest.fixture
def files() -> QueueCacheFiles:
    found = shared_files()
    assert found is not None
    return found


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = time.time()

    def time(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("queue_cache", "queue_cache_contents", "queue_cache_files"):
        monkeypatch.setattr(f"hpcaccel.slurm.{module}.time.time", clock.time)
    return clock


def one(queue: Queue, job_id: str, **options: Any) -> CachedJob:
    return queue.look([job_id], **options).jobs[job_id]


# -- few questions ----------------------------------------------------------------------------------------------------


def test_an_answer_serves_until_it_is_too_old(slurm: Any, files: QueueCacheFiles, clock: Clock) -> None:
    for _ in range(3):
        assert one(Queue(slurm, seconds=60, files=files), "1").state is JobState.RUNNING
        assert one(Queue(slurm, seconds=60, files=files), "46_3").state is JobState.RUNNING
    assert slurm.calls == ["queue"]
    slurm.move("1", JobState.PENDING)
    clock.now += 61
    assert one(Queue(slurm, seconds=60, files=files), "1").state is JobState.PENDING
    assert Queue(slurm, seconds=60, files=files).questions() == {"squeue": 2}


def test_after_a_change_the_next_question_is_a_new_one(slurm: Any, files: QueueCacheFiles, clock: Clock) -> None:
    queue = Queue(slurm, seconds=60, files=files)
    queue.look(["1"])
    note_change()
    queue.look(["1"], after=0.0)
    assert slurm.calls == ["queue"]  # who looks again and again is patient
    queue.look(["1"])
    queue.look(["1"])
    assert slurm.calls == ["queue", "queue"]


def test_a_command_that_changes_the_queue_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, says in (("sbatch", "echo 45"), ("scancel", "true"), ("squeue", "true")):
        (programs / name).write_text(f"#!/bin/sh\n{says}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    files = shared_files()
    assert files is not None
    Slurm().queue()
    assert files.changed() == 0.0
    (tmp_path / "job.sbatch").write_text("#!/bin/sh\n")
    changes: list[Callable[[], object]] = [
        lambda: Slurm().sbatch(tmp_path / "job.sbatch"),
        lambda: Slurm().cancel("45"),
    ]
    for change in changes:
        before = time.time()
        change()
        assert files.changed() > before


def test_a_job_that_is_newer_than_the_answer_is_asked_for(slurm: Any, files: QueueCacheFiles, clock: Clock) -> None:
    queue = Queue(slurm, seconds=60, files=files)
    queue.look(["1"])
    slurm.jobs["3"] = JobInfo(job_id="3", state=JobState.PENDING)
    new = {"3": clock.time()}
    waiting = one(queue, "3", submitted=new, after=0.0)
    assert (waiting.state, waiting.words) == (JobState.UNKNOWN, "Slurm has not been queried since it was submitted")
    assert one(queue, "3", submitted=new).state is JobState.PENDING
    assert slurm.calls == ["queue", "queue"]


def test_the_users_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("soon", "-1", "nan", "1e9"):
        monkeypatch.setenv("HPCACCEL_QUEUE_SECONDS", text)
        with pytest.raises(UserError, match=f"HPCACCEL_QUEUE_SECONDS='{text}' is not a number of seconds"):
            Queue()


# -- what is not gone -------------------------------------------------------------------------------------------------


def test_an_empty_answer_makes_nothing_gone(slurm: Any, files: QueueCacheFiles, clock: Clock) -> None:
    queue = Queue(slurm, seconds=60, files=files)
    queue.look(["1"])
    jobs, slurm.accounted = dict(slurm.jobs), False
    slurm.settings["MinJobAge"] = "300 sec"
    slurm.jobs.clear()  # a controller that has just started, and has lost its state or not read it yet
    clock.now += 61
    known = one(queue, "1")
    assert (known.state, known.gone) == (JobState.UNKNOWN, False)
    assert "although it did a moment ago; last seen RUNNING at " in known.words
    slurm.jobs.update(jobs)
    clock.now += 61
    assert one(queue, "1").state is JobState.RUNNING


def test_without_accounting_a_job_is_gone_once_slurm_may_have_forgotten_it(
    slurm: Any, files: QueueCacheFiles, clock: Clock
) -> None:
    slurm.accounted = False
    slurm.settings["MinJobAge"] = "300 sec"
    queue = Queue(slurm, seconds=60, files=files)
    queue.look(["1"])
    slurm.forget("1")
    clock.now += 301
    assert one(queue, "1").gone
    slurm.calls.clear()
    clock.now += 61
    assert one(queue, "1").gone
    assert slurm.calls == ["queue"]  # what is gone is not asked about again


def test_an_end_in_the_accounting_is_an_end(
    slurm: Any, files: QueueCacheFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.move("1", JobState.NODE_FAIL)
    monkeypatch.setattr(slurm, "queue", lambda *_, **__: {})
    known = one(Queue(slurm, seconds=60, files=files), "1")
    assert (known.state, known.gone) == (JobState.NODE_FAIL, False)
    assert slurm.calls == ["accounting"]


def test_an_accounting_that_believes_in_a_job_that_is_over(
    slurm: Any, files: QueueCacheFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "queue", lambda *_, **__: {})
    monkeypatch.setattr(slurm, "job", lambda _: None)
    assert one(Queue(slurm, seconds=60, files=files), "1").gone


def test_an_accounting_that_does_not_answer_is_left_alone_and_the_controller_asked(
    slurm: Any, files: QueueCacheFiles, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def accounting(job_ids: Any) -> Any:
        asked.append(job_ids)
        raise UserError("sacct: error: Connection refused")

    monkeypatch.setattr(slurm, "queue", lambda *_, **__: {})
    monkeypatch.setattr(slurm, "accounting", accounting)
    queue = Queue(slurm, seconds=60, files=files)
    assert one(queue, "1").state is JobState.RUNNING
    assert one(queue, "2").state is JobState.RUNNING
    assert asked == [["1"]]


def test_many_jobs_that_are_not_listed_are_asked_for_by_and_by(
    slurm: Any, files: QueueCacheFiles, clock: Clock
) -> None:
    slurm.accounted = False
    ids = [str(number) for number in range(100, 125)]
    queue = Queue(slurm, seconds=60, files=files)
    gone = []
    for _ in range(4):
        slurm.calls.clear()
        answer = queue.look(ids)
        gone.append(sum(known.gone for known in answer.jobs.values()))
        assert slurm.calls.count("job") <= 10
        clock.now += 61
    assert gone == [10, 20, 25, 25]


def test_what_was_found_before_a_job_was_submitted_is_of_another_job(
    slurm: Any, files: QueueCacheFiles, clock: Clock
) -> None:
    slurm.accounted = False
    slurm.settings["MinJobAge"] = "300 sec"
    queue = Queue(slurm, seconds=60, files=files)
    assert one(queue, "7").gone
    clock.now += 61
    assert not one(queue, "7", submitted={"7": clock.time()}, after=0.0).gone


# -- a Slurm that does not answer -------------------------------------------------------------------------------------


def test_an_outage_is_a_note_beside_the_last_answer(slurm: Any, files: QueueCacheFiles, clock: Clock) -> None:
    queue = Queue(slurm, seconds=60, files=files)
    before = queue.look(["1", "9"])
    slurm.calls.clear()
    slurm.unreachable = "Unable to contact slurm controller (connect failure)"
    clock.now += 61
    for _ in range(3):
        during = queue.look(["1", "8"])
    assert (during.asked, during.jobs["1"].state) == (before.asked, JobState.RUNNING)
    assert "Slurm does not respond" in during.note
    assert "connect failure" in during.note
    assert (during.jobs["8"].state, during.jobs["8"].gone) == (JobState.UNKNOWN, False)
    assert queue.questions()["squeue"] == 2
    slurm.unreachable = ""
    clock.now += 61
    assert queue.look(["1"]).note == ""


def test_who_waits_for_a_slow_answer_is_shown_the_old_one(
    slurm: Any, files: QueueCacheFiles, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr("hpcaccel.slurm.queue_cache.PATIENCE_SECONDS", 0.3)
    Queue(slurm, seconds=60, files=files).look(["1"])
    clock.now += 61
    with files.lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        answer = Queue(slurm, seconds=60, files=files).look(["1"])
        assert (answer.jobs["1"].state, answer.note) == (
            JobState.RUNNING,
            "a Slurm query is still running",
        )
        held.write("1.0")  # it was taken long ago: its holder was stopped by Ctrl-Z
        held.flush()
        assert Queue(slurm, seconds=60, files=files).look(["1"]).note == ""


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 99}', '{"version":1,"jobs":{"1":3}}'])
def test_a_damaged_file_costs_one_question(slurm: Any, files: QueueCacheFiles, text: str) -> None:
    files.answer.write_text(text)
    assert one(Queue(slurm, seconds=60, files=files), "1").state is JobState.RUNNING


# -- where it lies ----------------------------------------------------------------------------------------------------


def test_it_is_private(slurm: Any, files: QueueCacheFiles) -> None:
    Queue(slurm, seconds=60, files=files).look(["1"])
    note_change()
    assert files.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files.folder.iterdir()} == {0o600}


def test_where_nothing_can_be_written_a_process_asks_alone(
    slurm: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "state").write_text("a file")
    assert shared_files() is None
    note_change()
    queue = Queue(slurm, seconds=60)
    assert one(queue, "1").state is JobState.RUNNING
    assert one(queue, "2").state is JobState.RUNNING
    assert slurm.calls == ["queue"]


def test_each_cluster_has_an_answer_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(text: str) -> str:
        (home / "slurm.conf").write_text(text)
        return cluster_key()

    monkeypatch.setenv("SLURM_CONF", str(home / "slurm.conf"))
    first = key("# ours\nClusterName=alps\nSlurmctldHost=head(10.0.0.1)\nMinJobAge=300\n")
    assert first.startswith("alps-")
    assert key("SlurmctldHost = head(10.0.0.1) # the head\nclustername=alps\nMinJobAge=2\n") == first
    assert key("ClusterName=alps\nSlurmctldHost=head2\n") != first
    assert "/" not in key("ClusterName=../../etc\nSlurmctldHost=head2\n")
    monkeypatch.setenv("SLURM_CONF", str(home / "none.conf"))
    assert "/" not in cluster_key()
