"""Snapshots in memory: which count, what damages them, rooms and leftovers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from hpcaccel.checkpoint import CheckpointEngine, node_snapshots, restore_rng, snapshot_parts
from hpcaccel.checkpoint.node_snapshots import NodeSnapshots
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.snapshot_parts import Holdings, RankedSnapshot, SnapshotKey
from hpcaccel.checkpoint.snapshot_replicas import SnapshotReplicas, partners_of
from hpcaccel.checkpoint.snapshot_resume import SnapshotResume
from hpcaccel.checkpoint.written_file import WrittenFile
from hpcaccel.checkpoint_files import snapshot_folder, verify
from hpcaccel.checkpoint_files.snapshot_folder import SnapshotFolder
from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.records import AttemptEnd, AttemptStart, Decision, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import CheckpointError, Damaged
from tests.checkpoint.test_damage import flip
from tests.checkpoint.training import Training
from tests.checkpoint.world import run_ranks

pytestmark = pytest.mark.torch

FACTS = {"epoch": 0, "reason": "snapshot", "guarantee": "bit-exact", "guarantee_reasons": [], "mesh": {}, "attempt": 1}


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of /dev/shm."""
    monkeypatch.setattr(snapshot_folder, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def ranks_of(rank: int = 0, world_size: int = 1) -> CheckpointRanks:
    return CheckpointRanks(rank=rank, world_size=world_size)


def taking(
    folder: SnapshotFolder, *, rank: int = 0, world_size: int = 1, attempt: int = 1, here: int = 1
) -> NodeSnapshots:
    return NodeSnapshots(
        ranks_of(rank, world_size), folder, attempt=attempt, local_world_size=here, is_local_main=rank % here == 0
    )


def take(snapshots: NodeSnapshots, training: Training, step: int, world_size: int = 1) -> None:
    snapshots.take(training.state(), {**FACTS, "step": step, "world_size": world_size, "attempt": snapshots._attempt})


def resume_of(folder: SnapshotFolder, *, rank: int = 0, world_size: int = 1, main: bool = True) -> SnapshotResume:
    return SnapshotResume(ranks_of(rank, world_size), folder, is_local_main=main)


# -- which snapshot counts ---------------------------------------------------------------------------------------------


def held(key: SnapshotKey, *ranks: int, of: int = 2) -> list[Holdings]:
    return [{RankedSnapshot(key, of): dict.fromkeys(ranks, 100)}]


def test_only_a_snapshot_with_the_parts_of_all_ranks_counts() -> None:
    old, new = SnapshotKey(1, 1, 10), SnapshotKey(1, 2, 20)
    assert snapshot_parts.complete([*held(old, 0, 1), *held(new, 0)]) == (old, 2)
    assert snapshot_parts.complete([*held(old, 0, 1), *held(new, 0), *held(new, 1)]) == (new, 2)
    assert snapshot_parts.complete([*held(old, 0, 1), *held(new, 0, 1, of=3)]) == (old, 2)
    assert snapshot_parts.complete([*held(old, 0, 1), *held(new, 0, 1, 2, of=3)]) == (new, 3)
    assert snapshot_parts.complete(held(new, 0, 1, of=3)) is None
    assert snapshot_parts.complete([]) is None


def test_parts_of_two_attempts_are_never_mixed() -> None:
    first, second = SnapshotKey(1, 2, 20), SnapshotKey(2, 1, 20)
    assert snapshot_parts.complete([*held(first, 0), *held(second, 1)]) is None


def test_snapshot_of_an_earlier_step_or_of_an_abandoned_branch_is_not_used(memory: Path, tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path / "run", "n1")
    snapshots = taking(folder)
    take(snapshots, Training("plain"), 20)
    snapshots.agree()
    resume = resume_of(folder)
    for committed, used in ((None, True), ((20, 1), True), ((21, 1), False), ((19, 1), True), ((10, 2), False)):
        manifest = None if committed is None else {"step": committed[0], "attempt": committed[1]}
        assert (resume.find(committed=manifest) is not None) == used, committed


# -- taking and loading ------------------------------------------------------------------------------------------------


def test_newest_snapshot_is_loaded_and_the_training_continues_bit_identically(memory: Path, tmp_path: Path) -> None:
    training = Training("plain", seed=1)
    folder = SnapshotFolder(tmp_path / "run", "n1")
    snapshots = taking(folder)
    for step in (1, 2, 3, 4, 5):
        training.steps(1)
        take(snapshots, training, step)
    digest = training.digest()
    assert snapshots.agree() == SnapshotKey(1, 5, 5)
    losses = training.steps(3)
    assert sorted(path.name for path in folder.path.iterdir()) == ["step_00000004.1.4", "step_00000005.1.5"]
    again, resume = Training("plain", seed=2), resume_of(folder)
    found = resume.find(committed=None)
    assert found is not None
    loaded = resume.load(found, again.state())
    assert (loaded.step, loaded.guarantee, again.digest()) == (5, "bit-exact", digest)
    assert loaded.per_rank is not None
    restore_rng(loaded.per_rank)
    assert again.steps(3) == losses


def test_torn_newest_part_leaves_the_older_snapshot(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is killed after the copy, before the part is published."""
    training, folder = Training("plain"), SnapshotFolder(tmp_path / "run", "n1")
    snapshots = taking(folder)
    take(snapshots, training, 1)
    take(snapshots, training, 2)
    snapshots.agree()
    monkeypatch.setattr(NodeSnapshots, "_publish", lambda *args: None)
    take(snapshots, training, 3)
    found = resume_of(folder).find(committed=None)
    assert found is not None
    assert found.key.step == 2


@pytest.mark.parametrize("damage", ["record", "short", "missing", "record missing"])
def test_part_with_a_damaged_record_or_a_wrong_size_does_not_count(memory: Path, tmp_path: Path, damage: str) -> None:
    training, folder = Training("plain"), SnapshotFolder(tmp_path / "run", "n1")
    snapshots = taking(folder)
    take(snapshots, training, 1)
    take(snapshots, training, 2)
    snapshots.agree()
    place = folder.path / "step_00000002.1.2"
    record, file = place / "rank_00000.json", place / "rank_00000.bin"
    if damage == "record":
        text = bytearray(record.read_bytes())
        text[len(text) // 2] ^= 1
        record.write_bytes(text)
    elif damage == "short":
        os.truncate(file, 4096)
    else:
        (file if damage == "missing" else record).unlink()
    found = resume_of(folder).find(committed=None)
    assert found is not None
    assert found.key.step == 1


def test_flipped_bits_are_found_while_loading_and_the_older_snapshot_is_loaded(memory: Path, tmp_path: Path) -> None:
    training, folder = Training("plain"), SnapshotFolder(tmp_path / "run", "n1")
    snapshots = taking(folder)
    take(snapshots, training, 1)
    digest = training.digest()
    training.steps(1)
    take(snapshots, training, 2)
    snapshots.agree()
    file = folder.path / "step_00000002.1.2" / "rank_00000.bin"
    flip(file, 100, bit=2)
    resume = resume_of(folder)
    found = resume.find(committed=None)
    assert found is not None
    assert found.key.step == 2
    with pytest.raises(Damaged, match="step 2 in memory cannot be loaded"):
        resume.load(found, training.state())
    resume.drop(found.key)
    older = resume.find(committed=None)
    assert older is not None
    assert resume.load(older, training.state()).step == 1
    assert training.digest() == digest


def test_files_are_reused_by_this_attempt_and_those_of_the_last_one_are_removed(memory: Path, tmp_path: Path) -> None:
    training, folder = Training("plain"), SnapshotFolder(tmp_path / "run", "n1")
    first = taking(folder)
    for step in (1, 2, 3):
        take(first, training, step)
    first.agree()
    resume = resume_of(folder)
    found = resume.find(committed=None)
    assert found is not None
    resume.keep_only(found.key)
    second = taking(folder, attempt=2)
    for step in (4, 5, 6):
        take(second, training, step)
        second.agree()
        names = sorted(path.name.rpartition("/")[2] for path in folder.path.iterdir())
        assert len([name for name in names if name.startswith("step")]) == 2, names
    assert {path.stat().st_mode & 0o777 for path in folder.path.iterdir()} == {0o700}


# -- several ranks -----------------------------------------------------------------------------------------------------


def two_nodes(rank: int, shm: Path, run: Path, wrap: str, swap: bool) -> tuple[str, str, int, int]:
    """Ranks 0 and 1 on node a, rank 2 on node b; ``swap``: the attempt after that has rank 0 on node b."""
    snapshot_folder.SHARED_MEMORY = shm
    training = Training(wrap, seed=1, rank=rank)
    snapshots = taking(SnapshotFolder(run, "ba"[rank < 2]), rank=rank, world_size=3, here=2)
    for step in (1, 2):
        training.steps(1)
        take(snapshots, training, step, 3)
    snapshots.agree()
    before = training.digest(buffers=False)
    again = Training(wrap, seed=2, rank=rank)
    node = "ba"[rank > 0] if swap else "ba"[rank < 2]
    resume = resume_of(SnapshotFolder(run, node), rank=rank, world_size=3, main=rank < 2 if swap else rank != 1)
    found = resume.find(committed=None)
    assert found is not None
    loaded = resume.load(found, again.state())
    return before, again.digest(buffers=False), loaded.step, found.moved


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("swap", [False, True])
def test_ranks_on_two_nodes_send_each_other_the_parts_that_a_node_lacks(tmp_path: Path, wrap: str, swap: bool) -> None:
    (tmp_path / "shm").mkdir()
    for before, after, step, moved in run_ranks(
        two_nodes, tmp_path / "shm", tmp_path / "run", wrap, swap, world_size=3
    ):
        assert (after, step) == (before, 2)
        assert moved == (2 if swap else 0)


def lost_node(rank: int, shm: Path, run: Path, wrap: str) -> tuple[str, str, int | None, int]:
    """Ranks 0 and 1 on node a, rank 2 on node b. Node a is lost: ranks 0 and 1 start again on node c."""
    snapshot_folder.SHARED_MEMORY = shm
    training = Training(wrap, seed=1, rank=rank)
    folder = SnapshotFolder(run, "ab"[rank == 2])
    snapshots = NodeSnapshots(
        ranks_of(rank, 3), folder, attempt=1, local_world_size=2, is_local_main=rank != 1, replicas=True
    )
    for step in (1, 2, 3):
        training.steps(1)
        take(snapshots, training, step, 3)
    snapshots.agree()
    dist.barrier()
    before = training.digest(buffers=False)
    if rank == 0:
        shutil.rmtree(folder.path)
    dist.barrier()
    again = Training(wrap, seed=2, rank=rank)
    resume = resume_of(SnapshotFolder(run, "cb"[rank == 2]), rank=rank, world_size=3, main=rank != 1)
    found = resume.find(committed=None)
    if found is None:
        return before, before, None, 0
    loaded = resume.load(found, again.state())
    return before, again.digest(buffers=False), loaded.step, found.moved


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_parts_of_a_lost_node_come_from_the_next_one(tmp_path: Path, wrap: str) -> None:
    (tmp_path / "shm").mkdir()
    for before, after, step, moved in run_ranks(lost_node, tmp_path / "shm", tmp_path / "run", wrap, world_size=3):
        assert (after, step, moved) == (before, 3, 2)


def unreachable(rank: int, shm: Path, run: Path) -> tuple[bool, list[int], list[str]]:
    """Rank 1 closes its port after the first snapshot."""
    snapshot_folder.SHARED_MEMORY = shm
    training, folder = Training("fsdp", rank=rank), SnapshotFolder(run, f"n{rank}")
    snapshots = NodeSnapshots(
        ranks_of(rank, 2), folder, attempt=1, local_world_size=1, is_local_main=True, replicas=True
    )
    training.steps(1)
    replicas = None
    for step in (1, 2, 3):
        take(snapshots, training, step, 2)
        snapshots.agree()
        replicas = replicas or snapshots._replicas
        dist.barrier()
        if step == 1 and rank == 0:
            assert replicas is not None
            replicas._hosts = []
            replicas._disconnect()
    return (
        snapshots.is_on,
        sorted(key.step for key in snapshots._files.keys),
        sorted(f"{path.parent.name[:13]}/{path.stem}" for path in folder.path.glob("*/*.bin")),
    )


def test_training_goes_on_with_its_own_snapshots_if_the_next_node_cannot_be_reached(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    first, second = run_ranks(unreachable, tmp_path / "shm", tmp_path / "run")
    assert (first[:2], second[:2]) == ((True, [2, 3]),) * 2
    assert "step_00000001/rank_00000" in second[2]  # what had arrived
    assert [name for name in first[2] if name.endswith("rank_00001")] == [
        "step_00000002/rank_00001", "step_00000003/rank_00001"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "partners"),
    [("aabb", [2, 3, 0, 1]), ("aab", [2, 2, 0]), ("abc", [1, 2, 0]), ("abab", [1, 0, 3, 2]), ("aa", None)],
)
def test_partner_is_on_the_next_node(nodes: str, partners: list[int] | None) -> None:
    assert partners_of(nodes) == partners


def test_replica_is_refused_without_the_secret_of_this_training(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    assert run_ranks(stranger, tmp_path / "shm", tmp_path / "run") == [True, True]


def stranger(rank: int, shm: Path, run: Path) -> bool:
    """The ranks have different secrets."""
    snapshot_folder.SHARED_MEMORY = shm
    folder = SnapshotFolder(run, f"n{rank}")
    replicas = SnapshotReplicas(ranks_of(rank, 2), folder.path, attempt=1)
    replicas._secret = bytes([rank]) * 32
    dist.barrier()
    record = snapshot_parts.SnapshotRecord(rank, 2, WrittenFile.of(f"rank_{rank:05d}.bin", [0], [64]))
    refused = False
    try:
        replicas.send(SnapshotKey(1, 1, 1), record, memoryview(bytes(64)))
    except (OSError, EOFError):
        refused = True
    dist.barrier()
    return refused and list(folder.path.iterdir()) == []


def missing_rank(rank: int, shm: Path, run: Path) -> list[int | None]:
    snapshot_folder.SHARED_MEMORY = shm
    training = Training("ddp", seed=1, rank=rank)
    folder = SnapshotFolder(run, "n1")
    snapshots = taking(folder, rank=rank, world_size=2, here=2)
    for step in (1, 2):
        take(snapshots, training, step, 2)
    snapshots.agree()
    resume = resume_of(folder, rank=rank, world_size=2, main=rank == 0)
    steps: list[int | None] = []
    for name in ("step_00000002.1.2", "step_00000001.1.1"):
        found = resume.find(committed=None)
        steps.append(None if found is None else found.key.step)
        dist.barrier()
        if rank == 0:
            (folder.path / name / "rank_00001.json").unlink()
        dist.barrier()
    found = resume.find(committed=None)
    return [*steps, None if found is None else found.key.step]


def test_snapshot_in_which_a_rank_is_missing_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    assert run_ranks(missing_rank, tmp_path / "shm", tmp_path / "run") == [[2, 1, None]] * 2


def no_room_on_one(rank: int, shm: Path, run: Path) -> tuple[bool, list[str]]:
    snapshot_folder.SHARED_MEMORY = shm
    if rank == 1:
        node_snapshots.available_bytes = lambda: 1000  # type: ignore[attr-defined]
    folder = SnapshotFolder(run, f"n{rank}")
    snapshots = taking(folder, rank=rank, world_size=2)
    take(snapshots, Training("ddp", rank=rank), 1, 2)
    return snapshots.is_on, [path.name for path in folder.path.iterdir()]


def test_node_without_room_ends_the_snapshots_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    assert run_ranks(no_room_on_one, tmp_path / "shm", tmp_path / "run") == [(False, [])] * 2


def test_too_little_memory_is_logged_once_with_its_size(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_snapshots, "available_bytes", lambda: 1000)
    snapshots = taking(SnapshotFolder(tmp_path / "run", "n1"))
    take(snapshots, Training("plain"), 1)
    assert not snapshots.is_on
    assert len(caplog.records) == 1
    assert "no more snapshots are kept in memory: the snapshot of step 1 cannot be taken: 2 snapshots" in caplog.text


# -- to the disk -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [60.0, -1.0])
def test_snapshot_becomes_a_checkpoint_before_the_deadline(memory: Path, tmp_path: Path, seconds: float) -> None:
    training, folder = Training("plain", seed=1), SnapshotFolder(tmp_path / "run", "n1")
    engine = CheckpointEngine(tmp_path / "checkpoints", attempt=1)
    snapshots = taking(folder)
    training.steps(1)
    take(snapshots, training, 7)
    digest = training.digest()
    training.steps(1)
    step = engine.commit_snapshot(snapshots, "preempted", deadline=time.time() + seconds)
    if seconds < 0:
        assert step is None
        assert list((tmp_path / "checkpoints").iterdir()) == []
        return
    assert step == 7
    path = engine.find("auto")
    assert path is not None
    assert path.name == "step_00000007"
    assert json.loads((path / "COMMITTED").read_bytes())["reason"] == "preempted"
    assert verify.verify(path).good
    again = Training("plain", seed=2)
    again.load(engine)
    assert again.digest() == digest
    assert engine.commit_snapshot(snapshots, "preempted", deadline=None) is None  # it is committed


# -- folders -----------------------------------------------------------------------------------------------------------


def test_folder_of_another_user_or_open_to_others_is_refused(memory: Path, tmp_path: Path) -> None:
    user = memory / f"hpcaccel-{os.getuid()}"
    user.mkdir(mode=0o755)
    user.chmod(0o755)
    with pytest.raises(CheckpointError, match="not a private directory of this user"):
        SnapshotFolder(tmp_path / "run", "n1")
    user.rmdir()
    user.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="not a private directory of this user"):
        SnapshotFolder(tmp_path / "run", "n1")


def test_stale_folders_are_removed_and_those_of_living_ranks_and_runs_stay(memory: Path, tmp_path: Path) -> None:
    runs = {name: RunDir(tmp_path / name) for name in ("own", "alive", "supervised", "over")}
    folders = {name: SnapshotFolder(run.path, "n1") for name, run in runs.items()}
    for name in ("own", "supervised", "over"):
        folders[name].close()
    runs["supervised"].create()
    write_json(runs["supervised"].lease, {})
    snapshot_folder.remove_stale(besides=runs["own"].path)
    assert {name for name, folder in folders.items() if folder.run.exists()} == {"own", "alive", "supervised"}
    for name in ("alive", "supervised"):
        long_ago = time.time() - 2 * snapshot_folder.ABANDONED_SECONDS
        for path in (folders[name].run, *folders[name].run.iterdir()):
            os.utime(path, (long_ago, long_ago))
    snapshot_folder.remove_stale(besides=runs["own"].path)
    assert {name for name, folder in folders.items() if folder.run.exists()} == {"own", "alive"}
    snapshot_folder.remove(runs["own"].path)
    assert not folders["own"].run.exists()


@pytest.mark.parametrize(
    ("decision", "stays"), [("requeue", True), ("pause", False), ("end", False)], ids=lambda value: str(value)
)
def test_snapshots_of_a_requeued_job_stay_until_its_next_start(
    memory: Path, tmp_path: Path, decision: Decision, stays: bool
) -> None:
    """No supervisor holds the run's lease while its job is pending again."""
    run = RunDir(tmp_path / "other")
    run.create()
    folder = SnapshotFolder(run.path, "n1")
    folder.close()
    append_line(run.ledger, to_dict(AttemptStart(attempt=1, time=1.0, job_id="7")))
    append_line(run.ledger, to_dict(AttemptEnd(attempt=1, time=2.0, job_id="7", reason="preempted", decision=decision)))
    snapshot_folder.remove_stale(besides=tmp_path / "own")
    assert folder.run.exists() is stays
    if stays:
        long_ago = time.time() - 2 * snapshot_folder.ABANDONED_SECONDS
        for path in (folder.run, *folder.run.iterdir()):
            os.utime(path, (long_ago, long_ago))
        snapshot_folder.remove_stale(besides=tmp_path / "own")
        assert not folder.run.exists()


def test_lock_is_released_when_the_process_is_killed(memory: Path, tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from hpcaccel.checkpoint_files import snapshot_folder as s\n"
        "s.SHARED_MEMORY = Path(sys.argv[1]); f = s.SnapshotFolder(Path(sys.argv[2]), 'n1')\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(memory), str(tmp_path / "other")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        snapshot_folder.remove_stale(besides=tmp_path / "own")
        (folder,) = (memory / f"hpcaccel-{os.getuid()}").iterdir()
        process.send_signal(signal.SIGKILL)
        process.wait()
    snapshot_folder.remove_stale(besides=tmp_path / "own")
    assert not folder.exists()
