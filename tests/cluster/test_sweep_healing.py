"""A sweep on a real Slurm with one cancelled and one preempted worker: no step is lost or counted twice, and every
trial is reported once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_lines
from hpcaccel.submission.jobs.run_state import read_record
from hpcaccel.sweeps.journal_reader import read_study
from hpcaccel.sweeps.sweep_handle import sweep as start

from .dev_cluster import Cluster, wait_until
from .test_sweep_commands import COUNTS, SPEC

Lease = Callable[[int], list[str]]


@pytest.mark.chaos
def test_trial_of_a_cancelled_worker_is_taken_over_and_no_step_is_lost(
    cluster: Cluster, lease: Lease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**cluster.env, "XDG_STATE_HOME": str(tmp_path / "state")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    node = lease(1)[0]
    Path("train.py").write_text(COUNTS)
    Path("sweep.yaml").write_text(SPEC.replace("NODE", node))
    sweep = start("sweep.yaml", cluster="slurm")
    journal = sweep.dir.journal
    try:
        begun = [sweep.dir.trial(number).foreign_metrics(1) for number in (0, 1)]
        wait_until(lambda: all(path.exists() and path.stat().st_size > 200 for path in begun), "two trials run")
        cluster.run("scancel", read_record(sweep.dir.worker(1)).job_ids[-1])
        account = sweep.dir.worker(1).account
        wait_until(lambda: "cancelled" in account.read_text(), "the cancelled worker has left")
        cluster.sbatch(
            "--partition=urgent", f"--nodelist={node}", "--exclusive", "--wrap=sleep 2", "--output=/dev/null"
        )
        account = sweep.dir.worker(0).account
        wait_until(
            lambda: account.read_text().count('"start"') == 2, "the preempted worker is back", timeout_seconds=600
        )
        done = sweep.wait(900)
    finally:
        if not sweep.status().ended:
            sweep.cancel()
    assert done.trials["complete"] == 3
    assert done.workers == {"completed": 1, "cancelled": 1}
    interrupted = 0
    for number in range(3):
        folder = sweep.dir.trial(number)
        logged = [read_lines(folder.foreign_metrics(attempt)) for attempt in (1, 2, 3)]
        assert [line["step"] for attempt in logged for line, _ in attempt] == list(range(1, 41))
        ends = [line["reason"] for line, _ in read_lines(folder.ledger) if line["event"] == "end"]
        assert ends[-1] == "completed"
        assert "completed" not in ends[:-1]
        interrupted += len(ends) - 1
    assert interrupted == 2  # once by the cancel, once by the preemption
    told = Counter(
        line["trial_id"] for line, _ in read_lines(journal) if line.get("op_code") == 6 and line["state"] == 1
    )
    assert told == {0: 1, 1: 1, 2: 1}
    owners = {note["trial"]: note["worker"] for note in read_study(journal).notes if note["hpcaccel"] == "claim"}
    assert set(owners.values()) == {0}
