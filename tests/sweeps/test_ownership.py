"""Ownership of trials, and detection of dead workers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.records import WorkerStart, to_dict
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.slurm.states import JobInfo, JobState
from hpcaccel.sweeps.journal_file import JournalFile
from hpcaccel.sweeps.journal_notes import OwnershipNotes
from hpcaccel.sweeps.journal_reader import StudyRecord
from hpcaccel.sweeps.worker_jobs import gone_for_good
from tests.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    sweep = SweepDir(tmp_path / "20261120-153012-4f2a")
    sweep.create()
    return sweep


def claim(journal: JournalFile, trial: int, worker: int, epoch: int) -> None:
    journal.append([{"hpcaccel": "claim", "trial": trial, "worker": worker, "epoch": epoch}])


def test_first_claim_of_an_epoch_wins(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "journal.jsonl")
    notes = OwnershipNotes(StudyRecord(tmp_path / "journal.jsonl"))
    claim(journal, 7, 0, 1)
    claim(journal, 7, 1, 1)
    assert (notes.read().owner(7), notes.epoch(7)) == (0, 1)
    claim(journal, 7, 2, 2)
    claim(journal, 7, 0, 2)
    claim(journal, 7, 3, 9)
    assert (notes.read().owner(7), notes.epoch(7)) == (2, 2)
    assert notes.owner(8) is None


def test_at_least_one_of_many_concurrent_claims_wins(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"

    def take(worker: int) -> None:
        notes = OwnershipNotes(StudyRecord(path)).read()
        claim(JournalFile(path), 0, worker, notes.epoch(0) + 1)
        won[worker] = notes.read().owner(0)

    won: dict[int, int | None] = {}
    workers = [threading.Thread(target=take, args=(worker,)) for worker in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    last = OwnershipNotes(StudyRecord(path)).read().owner(0)
    assert last is not None
    assert won[last] == last  # the owner of the newest epoch has read that it is


def test_resume_note_clears_a_halt(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "journal.jsonl")
    notes = OwnershipNotes(StudyRecord(tmp_path / "journal.jsonl"))
    journal.append([{"hpcaccel": "halt", "why": "nothing works"}])
    assert notes.read().halted == "nothing works"
    journal.append([{"hpcaccel": "resume"}])
    assert notes.read().halted == ""


def on_slurm(sweep: SweepDir, slurm: FakeSlurm, worker: int, state: JobState) -> None:
    sweep.worker(worker).prepare()
    address = f"46_{worker}"
    append_line(sweep.worker(worker).account, to_dict(WorkerStart(time=1, job_id=address)))
    slurm.jobs[address] = JobInfo(job_id=address, array_job_id="46", array_task_id=worker, state=state)


def test_pending_running_or_completing_worker_is_not_dead(sweep: SweepDir) -> None:
    slurm = FakeSlurm()
    states = [JobState.PENDING, JobState.RUNNING, JobState.COMPLETING, JobState.REQUEUE_HOLD]
    for worker, state in enumerate(states):
        on_slurm(sweep, slurm, worker, state)
    assert gone_for_good(sweep, range(9), slurm) == set()  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.TIMEOUT, JobState.PREEMPTED, JobState.NODE_FAIL])
def test_worker_whose_job_has_ended_is_dead(sweep: SweepDir, state: JobState) -> None:
    slurm = FakeSlurm()
    on_slurm(sweep, slurm, 0, JobState.RUNNING)
    on_slurm(sweep, slurm, 1, state)
    assert gone_for_good(sweep, [0, 1], slurm) == {1}  # type: ignore[arg-type]


def test_worker_unknown_to_slurm_is_dead_unless_slurm_is_unreachable(sweep: SweepDir) -> None:
    slurm = FakeSlurm()
    on_slurm(sweep, slurm, 0, JobState.RUNNING)
    slurm.forget("46_0")
    assert gone_for_good(sweep, [0], slurm) == {0}  # type: ignore[arg-type]
    slurm.unreachable = "Unable to contact slurm controller"
    assert gone_for_good(sweep, [0], slurm) == set()  # type: ignore[arg-type]


def test_resubmitted_worker_is_not_dead_before_it_starts(sweep: SweepDir) -> None:
    slurm = FakeSlurm()
    on_slurm(sweep, slurm, 0, JobState.CANCELLED)
    slurm.jobs["50_0"] = JobInfo(job_id="50_0", array_job_id="50", array_task_id=0, state=JobState.PENDING)
    write_json(sweep.worker(0).record, {"job_ids": ["46_0", "50_0"]})
    assert gone_for_good(sweep, [0], slurm) == set()  # type: ignore[arg-type]


def test_local_worker_is_dead_when_its_process_has_ended(sweep: SweepDir) -> None:
    def local(worker: int, pid: int, host: str) -> None:
        sweep.worker(worker).prepare()
        start = WorkerStart(time=1, job_id="local-1", host=host, pid=pid, pid_start=process_start(pid) or 0)
        append_line(sweep.worker(worker).account, to_dict(start))

    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    local(0, os.getpid(), socket.gethostname())
    local(1, other.pid, socket.gethostname())
    local(2, other.pid, "elsewhere")
    assert gone_for_good(sweep, [0, 1, 2], FakeSlurm()) == set()  # type: ignore[arg-type]
    other.communicate(b"\n")
    assert gone_for_good(sweep, [0, 1, 2], FakeSlurm()) == {1}  # type: ignore[arg-type]
