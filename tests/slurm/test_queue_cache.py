"""Tests of the shared queue cache: number of queries, use of old results, and when a job is gone."""

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
    """Fake clock: a test sets the time, and each call adds 1 ms."""

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


# -- number of queries ------------------------------------------------------------------------------------------------


def test_cached_result_is_used_until_it_is_too_old(slurm: Any, files: QueueCacheFiles, clock: Clock) -> None:
    for _ in range(3):
        assert one(Queue(slurm, seconds=60, files=files), "1").state is JobState.RUNNING
        assert one(Queue(slurm, seconds=60, files=files), "46_3").state is JobState.RUNNING
    assert slurm.calls == ["queue"]
    slurm.move("1", JobState.PENDING)
    clock.now += 61
    assert one(Queue(slurm, seconds=60, files=files), "1").state is JobState.PENDING
    assert Queue(slurm, seconds=60, files=files).questions() == {"squeue": 2}


def test_next_look_after_a_change_queries_slurm_once(slurm: Any, files: QueueCacheFiles, clock: Clock) -> None:
    queue = Queue(slurm, seconds=60, files=files)
    queue.look(["1"])
    note_change()
    queue.look(["1"], after=0.0)
    assert slurm.calls == ["queue"]  # after=0.0: any valid result will do
    queue.look(["1"])
    queue.look(["1"])
    assert slurm.calls == ["queue", "queue"]


def test_sbatch_and_scancel_record_a_change_of_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_job_newer_than_cached_result_is_queried(slurm: Any, files: QueueCacheFiles, clock: Clock) -> None:
    queue = Queue(slurm, seconds=60, files=files)
    queue.look(["1"])
    slurm.jobs["3"] = JobInfo(job_id="3", state=JobState.PENDING)
    new = {"3": clock.time()}
    waiting = one(queue, "3", submitted=new, after=0.0)
    assert (waiting.state, waiting.words) == (JobState.UNKNOWN, "Slurm has not been queried since the submission")
    assert one(queue, "3", submitted=new).state is JobState.PENDING
    assert slurm.calls == ["queue", "queue"]


def test_invalid_hpcaccel_queue_seconds_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("soon", "-1", "nan", "1e9"):
        monkeypatch.setenv("HPCACCEL_QUEUE_SECONDS", text)
        with pytest.raises(UserError, match=f"HPCACCEL_QUEUE_SECONDS='{text}' is not a number of seconds"):
            Queue()


# -- jobs that are gone or not -----------------------------------------------------------------------------------------


def test_empty_queue_does_not_make_a_job_gone_before_min_job_age(
    slurm: Any, files: QueueCacheFiles, clock: Clock
) -> None:
    queue = Queue(slurm, seconds=60, files=files)
    queue.look(["1"])
    jobs, slurm.accounted = dict(slurm.jobs), False
    slurm.settings["MinJobAge"] = "300 sec"
    slurm.jobs.clear()  # as a controller that has just started and lost its state, or has not read it yet
    clock.now += 61
    known = one(queue, "1")
    assert (known.state, known.gone) == (JobState.UNKNOWN, False)
    assert "although it did recently; last seen RUNNING at " in known.words
    slurm.jobs.update(jobs)
    clock.now += 61
    assert one(queue, "1").state is JobState.RUNNING


def test_without_accounting_a_job_is_gone_after_min_job_age(slurm: Any, files: QueueCacheFiles, clock: Clock) -> None:
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
    assert slurm.calls == ["queue"]  # no further query for a job that is gone


def test_end_of_unlisted_job_is_read_from_accounting(
    slurm: Any, files: QueueCacheFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.move("1", JobState.NODE_FAIL)
    monkeypatch.setattr(slurm, "queue", lambda *_, **__: {})
    known = one(Queue(slurm, seconds=60, files=files), "1")
    assert (known.state, known.gone) == (JobState.NODE_FAIL, False)
    assert slurm.calls == ["accounting"]


def test_job_unknown_to_controller_is_gone_though_accounting_lists_it(
    slurm: Any, files: QueueCacheFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "queue", lambda *_, **__: {})
    monkeypatch.setattr(slurm, "job", lambda _: None)
    assert one(Queue(slurm, seconds=60, files=files), "1").gone


def test_after_accounting_fails_only_the_controller_is_queried(
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


def test_at_most_ten_unlisted_jobs_are_queried_per_look(slurm: Any, files: QueueCacheFiles, clock: Clock) -> None:
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


def test_result_older_than_submission_does_not_make_a_job_gone(
    slurm: Any, files: QueueCacheFiles, clock: Clock
) -> None:
    slurm.accounted = False
    slurm.settings["MinJobAge"] = "300 sec"
    queue = Queue(slurm, seconds=60, files=files)
    assert one(queue, "7").gone
    clock.now += 61
    assert not one(queue, "7", submitted={"7": clock.time()}, after=0.0).gone


# -- Slurm does not respond --------------------------------------------------------------------------------------------


def test_outage_is_noted_and_the_last_result_is_returned(slurm: Any, files: QueueCacheFiles, clock: Clock) -> None:
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


def test_old_result_is_returned_while_another_query_is_slow(
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
        held.write("1.0")  # the lock was taken long ago: Ctrl-Z stopped its holder
        held.flush()
        assert Queue(slurm, seconds=60, files=files).look(["1"]).note == ""


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 99}', '{"version":1,"jobs":{"1":3}}'])
def test_damaged_cache_file_is_replaced_by_a_query(slurm: Any, files: QueueCacheFiles, text: str) -> None:
    files.answer.write_text(text)
    assert one(Queue(slurm, seconds=60, files=files), "1").state is JobState.RUNNING


# -- the cache files --------------------------------------------------------------------------------------------------


def test_cache_files_are_readable_by_their_owner_only(slurm: Any, files: QueueCacheFiles) -> None:
    Queue(slurm, seconds=60, files=files).look(["1"])
    note_change()
    assert files.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files.folder.iterdir()} == {0o600}


def test_result_is_cached_in_memory_if_state_directory_is_unusable(
    slurm: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "state").write_text("a file")
    assert shared_files() is None
    note_change()
    queue = Queue(slurm, seconds=60)
    assert one(queue, "1").state is JobState.RUNNING
    assert one(queue, "2").state is JobState.RUNNING
    assert slurm.calls == ["queue"]


def test_cluster_key_depends_on_cluster_name_and_host(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
