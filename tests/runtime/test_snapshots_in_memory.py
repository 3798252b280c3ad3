"""Snapshots in memory in a training: crashed ranks resume from them, exactly, and without reading checkpoints."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import snapshot_folder, verify
from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.rank_records import Timing
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir
from tests.cluster.scenario import PROGRAMS as CLUSTER_PROGRAMS
from tests.cluster.scenario import Scenario
from tests.runtime.ranks import Ended, Ranks, make_run, metrics, outcome, request_stop, run_ranks

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path) -> Iterator[None]:
    """Remove what a failed test leaves in /dev/shm."""
    yield
    for run in tmp_path.iterdir():
        snapshot_folder.remove(run)


def folder_of(run: RunDir) -> Path:
    return snapshot_folder._run_folder(run.path)


def killed(run: RunDir, *arguments: str, size: int = 2) -> None:
    """Run attempt 1, of which a rank kills itself."""
    ended = Ranks("snapshots.py", *arguments, size=size, run=run)
    for process in ended.processes:
        process.wait(timeout=120)
    ended.wait()


def attempt(run: RunDir, number: int, *arguments: str, size: int = 2) -> Ended:
    ended = run_ranks("snapshots.py", arguments, size=size, run=run, attempt=number)
    assert ended.codes == [0] * size, "\n".join(ended.outputs)
    return ended


@pytest.mark.parametrize("strategy", [[], ["--fsdp"]])
def test_killed_rank_resumes_from_memory_bit_identically_and_reads_no_checkpoint(
    tmp_path: Path, strategy: list[str]
) -> None:
    schedule: dict[str, Any] = {"every_steps": 10, "snapshot_every_steps": 3}
    whole, run = make_run(tmp_path / "whole"), make_run(tmp_path / "run", checkpoint=schedule)
    attempt(whole, 1, *strategy)
    killed(run, *strategy, "--kill-at", "17", "--kill-rank", "1")
    ended = attempt(run, 2, *strategy)
    print(ended.outputs[0])
    assert "resumed at step 15 from memory, bit-exact" in ended.outputs[0]
    for output in ended.outputs:
        opened = json.loads(output.splitlines()[-1])["opened"]
        assert set(opened) <= {"COMMITTED"}, opened
    progress = read_json(run.progress(2))
    assert progress is not None
    assert progress["resumed_from"] == "memory"
    assert metrics(run) == metrics(whole)
    assert not folder_of(run).exists()


def test_fewer_ranks_resume_from_memory_as_from_a_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    in_memory, on_disk = (
        make_run(tmp_path / name, checkpoint=schedule)
        for name, schedule in (
            ("memory", {"every_steps": 100, "snapshot_every_steps": 5}),
            ("disk", {"every_steps": 5, "background": False}),
        )
    )
    for run, where in ((in_memory, "memory"), (on_disk, str(on_disk.checkpoints / "step_00000015"))):
        killed(run, "--fsdp", "--kill-at", "17", "--kill-rank", "1", size=3)
        (first, _) = attempt(run, 2, "--fsdp").outputs
        assert f"resumed at step 15 from {where}, state-exact (world_size: 3 at the save, 2 now)" in first
    found, expected = metrics(in_memory), metrics(on_disk)
    assert max(expected) == 30
    assert {step: found[step] for step in range(16, 31)} == {step: expected[step] for step in range(16, 31)}


def test_leftover_or_torn_snapshot_is_not_loaded_and_the_last_checkpoint_is(tmp_path: Path) -> None:
    """The records of rank 1 are torn."""
    run = make_run(tmp_path / "run", checkpoint={"every_steps": 10, "snapshot_every_steps": 3, "background": False})
    killed(run, "--kill-at", "17", "--kill-rank", "1")
    for record in folder_of(run).glob("*/step_*/rank_00001.json"):
        record.write_bytes(record.read_bytes()[:-20])
    ended = attempt(run, 2)
    assert "resumed at step 10 from" in ended.outputs[0]
    assert "from memory" not in ended.outputs[0]
    assert not folder_of(run).exists()


def stop(run: RunDir, ranks: Ranks, **request: Any) -> Ended:
    """Request a stop once a snapshot is complete."""
    give_up = time.monotonic() + 120
    while len(list(folder_of(run).glob("*/step_*/rank_*.json"))) < len(ranks.processes):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    request_stop(run, **request)
    for process in ranks.processes:
        process.send_signal(signal.SIGUSR2)
    return ranks.wait()


def test_stop_without_time_for_a_save_commits_the_newest_snapshot(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", checkpoint={"snapshot_every_steps": 4})
    whole = make_run(tmp_path / "whole")
    run.attempt(0).mkdir()
    write_json(run.timing(0), to_dict(Timing(slowest_save_seconds=3600.0)))
    ranks = Ranks("snapshots.py", "--steps", "100000", "--pause", "0.03", size=2, run=run, blocked=True)
    ended = stop(run, ranks, deadline=time.time() + 600)
    assert ended.codes == [85, 85], ended.outputs
    (saved,) = checkpoint_files.committed(run.checkpoints)
    assert saved.step % 4 == 0
    assert saved.manifest["reason"] == "preempted"
    left = outcome(run)
    assert left is not None
    assert left["checkpoint"] == saved.name
    assert verify.verify(saved.path).good
    snapshot_folder.remove(run.path)  # as on other nodes
    steps = str(saved.step + 8)
    ended = attempt(run, 2, "--steps", steps)
    assert f"resumed at step {saved.step} from {saved.path}, bit-exact" in ended.outputs[0]
    attempt(whole, 1, "--steps", steps)
    found, expected = metrics(run), metrics(whole)
    assert {step: found[step] for step in expected} == expected


@pytest.mark.parametrize("then", ["requeue", "cancel"])
def test_snapshots_stay_for_a_requeue_and_are_removed_when_the_run_is_cancelled(tmp_path: Path, then: str) -> None:
    run = make_run(tmp_path / "run", checkpoint={"snapshot_every_steps": 4})
    ranks = Ranks("snapshots.py", "--steps", "100000", "--pause", "0.03", size=1, run=run, blocked=True)
    stop(run, ranks, then=then)
    assert folder_of(run).exists() == (then == "requeue")


def test_automatic_interval_and_a_node_without_room(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", checkpoint={"snapshot_every_steps": "auto"})
    killed(run, "--kill-at", "30", "--pause", "0.02", size=1)
    assert "resumed at step 2" in attempt(run, 2, size=1).outputs[0]
    crowded = make_run(tmp_path / "crowded", checkpoint={"snapshot_every_steps": 2})
    folder_of(crowded).parent.mkdir(mode=0o700, exist_ok=True)
    folder_of(crowded).write_text("a file in place of the folder")
    ended = attempt(crowded, 1, size=1)
    folder_of(crowded).unlink()
    assert ended.outputs[0].count("no snapshots are kept in memory") == 1


@pytest.mark.chaos
def test_rank_killed_on_the_local_backend_resumes_from_memory(tmp_path: Path) -> None:
    scenario = Scenario(None, tmp_path)
    scenario.submit(
        {
            "entrypoint": {"script": str(CLUSTER_PROGRAMS / "train.py"), "args": ["--pause", "0.2"]},
            "slurm": {"nodes": 1, "gpus_per_node": 0, "ntasks_per_node": 2, "mem": None},
            "runtime": {"deterministic": True},
            "checkpoint": {"every_steps": 100_000, "snapshot_every_steps": 2},
        }
    )
    scenario.wait_for_step(7)
    os.kill(int(scenario.wait_for_word("starting", rank=1).split()[1]), signal.SIGKILL)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("failed", "restart"), ("completed", "end")], scenario.story
    first, second = scenario.lines("end")
    assert second["resumed_from"] == "memory", scenario.story
    assert first["last_step"] - second["resumed_step"] <= 4, scenario.story
    history = scenario.status()["history"]
    assert history[1]["progress"]["resumed_from"] == "memory"
    assert scenario.status()["steps_lost"] == first["last_step"] - second["resumed_step"]
    assert not folder_of(scenario.dir).exists()
