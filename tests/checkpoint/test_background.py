"""Background saves: same bytes as a blocking save, one at a time, and every failure is raised on all ranks."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import CheckpointEngine, TrainingState, background, snapshot_memory
from hpcaccel.checkpoint_files import manifest
from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.free_memory import available_bytes
from hpcaccel.errors import CheckpointError
from tests.checkpoint.test_faults import contents
from tests.checkpoint.training import Training
from tests.checkpoint.world import Killed, run_ranks
from tests.runtime.ranks import make_run
from tests.runtime.ranks import run_ranks as run_program


def writer_of(engine) -> int:
    return engine.background._writer._process.pid


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name.startswith("rank_")}


def settle(engine):
    """Wait for the save in flight and finish it, as the training loop does."""
    while engine.progress() == "busy":
        time.sleep(0.002)
    engine.drain()


def message(work):
    with pytest.raises(CheckpointError) as caught:
        work()
    return str(caught.value)


# -- on two ranks ------------------------------------------------------------------------------------------------------


class Program:
    """Background saves on two ranks, one method per part; results by name in ``found``."""

    def __init__(self, rank, directory):
        self.rank, self.directory = rank, directory
        self.saved = []
        self.engine = CheckpointEngine(
            directory / "main", rank=rank, world_size=2, keep=2, local_world_size=2, on_saved=self.saved.append
        )
        self.training = Training("ddp", rank=rank)
        self.training.steps(1)
        self.found = {}

    def start(self, step):
        return self.engine.save(self.training.state(), step=step, reason="due", background=True)

    def one(self):
        self.start(1)
        in_flight = self.engine.in_flight
        settle(self.engine)
        self.found["in flight"] = in_flight, self.engine.in_flight

    def one_at_a_time(self):
        for step in (2, 3, 4):
            self.start(step)
        found = self.engine.find("auto")
        self.found["newest"] = found.name
        self.found["kept"] = contents(self.directory / "main")
        self.found["saves"] = [(save.step, save.background, save.stall_seconds > 0) for save in self.saved]

    def killed_writer(self):
        if self.rank == 1:
            os.kill(writer_of(self.engine), signal.SIGSTOP)
        self.start(5)
        before = self.engine.progress()
        if self.rank == 1:
            os.kill(writer_of(self.engine), signal.SIGKILL)
        self.found["killed writer"] = message(self.engine.drain)
        self.found["stopped writer"] = before
        self.found["after the kill"] = contents(self.directory / "main")

    def no_snapshot(self):
        snapshot, snapshot_memory.SnapshotMemory.snapshot = snapshot_memory.SnapshotMemory.snapshot, _refuse
        if self.rank == 0:
            snapshot_memory.SnapshotMemory.snapshot = snapshot
        self.start(5)
        snapshot_memory.SnapshotMemory.snapshot = snapshot
        self.found["no snapshot"] = message(self.engine.drain)
        self.start(5)
        self.engine.drain()
        self.found["at last"] = contents(self.directory / "main")

    def no_memory(self):
        engine = CheckpointEngine(self.directory / "small", rank=self.rank, world_size=2, on_saved=self.saved.append)
        records = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("hpcaccel.checkpoint.background").addHandler(handler)
        module: Any = background
        room, module.no_room = module.no_room, lambda size, of: "it is full" if self.rank == 1 else None
        for step in (1, 2):
            engine.save(self.training.state(), step=step, background=True)
            assert engine.in_flight is None
        module.no_room = room
        self.found["told"] = records

    def run(self):
        for part in (self.one, self.one_at_a_time, self.killed_writer, self.no_snapshot, self.no_memory):
            part()
        pid = writer_of(self.engine)
        self.engine.close()
        self.found["gone"] = not Path(f"/proc/{pid}").exists()
        return self.found


def _refuse(*_, **__):
    raise RuntimeError("no copy")


def _program(rank, directory):
    return Program(rank, directory).run()


def test_two_ranks_save_in_the_background_and_recover_from_failures(tmp_path):
    first, second = run_ranks(_program, tmp_path)
    assert first["in flight"] == second["in flight"] == (1, None)
    assert first["newest"] == second["newest"] == "step_00000004"
    assert first["kept"] == ["step_00000003", "step_00000004"]
    assert first["saves"] == [(step, True, True) for step in (1, 2, 3, 4)]
    assert second["saves"] == []

    assert first["stopped writer"] in ("busy", "done")
    assert second["stopped writer"] == "busy"
    assert first["killed writer"] == second["killed writer"]
    assert "step 5 cannot be saved: the writer process ended (signal SIGKILL)" in first["killed writer"]
    assert "(rank 1 on " in first["killed writer"]
    assert first["after the kill"] == ["step_00000003", "step_00000004"]
    assert first["no snapshot"] == second["no snapshot"]
    assert "RuntimeError: no copy (rank 1 on " in first["no snapshot"]
    assert first["at last"] == ["step_00000004", "step_00000005"]
    assert [told for told in first["told"] if "it is full" in told] == [
        "checkpoints are not written in the background; training waits for each save: it is full"
    ]
    assert second["told"] == []
    assert [checkpoint.step for checkpoint in checkpoint_files.committed(tmp_path / "small")] == [1, 2]
    assert first["gone"]
    assert second["gone"]

    assert manifest.read(tmp_path / "main" / "step_00000005")["world_size"] == 2


def _same(rank, directory):
    training = Training("fsdp", rank=rank)
    training.steps(2)
    digest = training.digest()
    for name, in_background in (("waited", False), ("background", True)):
        engine = CheckpointEngine(directory / name, rank=rank, world_size=2)
        engine.save(training.state(), step=2, background=in_background)
        if in_background:
            for parameter in training.model.parameters():
                parameter.detach().fill_(0)
        engine.drain()
        engine.close()
    return digest


def test_background_save_writes_the_same_bytes_as_a_blocking_save(tmp_path):
    digest, _ = run_ranks(_same, tmp_path)
    waited, later = (tmp_path / name / "step_00000002" for name in ("waited", "background"))
    assert files(waited) == files(later)
    assert len(files(later)) == 2
    assert (waited / "index.json").read_bytes() == (later / "index.json").read_bytes()
    unlike = {"time", "crc32"}
    told = [
        {k: v for k, v in json.loads((path / "COMMITTED").read_text()).items() if k not in unlike}
        for path in (waited, later)
    ]
    assert told[0] == told[1]
    again = Training("plain", seed=9)
    again.load(CheckpointEngine(tmp_path / "background"))
    assert again.digest() == digest


# -- full disk, killed rank --------------------------------------------------------------------------------------------


def _fill_the_disk(rank, directory):
    engine = CheckpointEngine(directory, rank=rank, world_size=2)
    engine.save(TrainingState(), step=1)
    large = {"large": torch.zeros(1 << 20)} if rank == 1 else {}
    engine.save(TrainingState(per_rank=large), step=2, background=True)
    while rank == 1 and engine.progress() != "failed":
        time.sleep(0.002)
    said = message(lambda: engine.settle(failed=True))  # as the training loop does once all ranks know
    engine.close()
    return said


def test_full_disk_is_an_error_on_all_ranks_and_older_checkpoint_stays(mounted):
    disk = mounted("size=1m")
    first, second = run_ranks(_fill_the_disk, disk)
    assert contents(disk) == ["step_00000001"]
    assert first == second
    assert "No space left on device" in first
    assert "(rank 1 on " in first
    needed = re.search(r"it needs ([\d,]+) bytes, ([\d,]+) are free", first)
    assert needed is not None, first
    assert int(needed[1].replace(",", "")) >= 4 << 20 > int(needed[2].replace(",", ""))


def _killed_rank(rank, directory, who, where):
    engine = CheckpointEngine(directory, rank=rank, world_size=2, attempt=1)
    training = Training("ddp", rank=rank)
    for step in (1, 2):
        training.steps(1)
        engine.save(training.state(), step=step, background=True)
        if step == 1:
            settle(engine)
    (directory / f"writer.{rank}").write_text(str(writer_of(engine)))
    if where == "others wait" and rank != who:
        os.kill(writer_of(engine), signal.SIGSTOP)
        time.sleep(0.3)
    if rank == who:
        if where == "others wait":
            time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.5)
    if where == "others wait":
        os.kill(writer_of(engine), signal.SIGCONT)
    os._exit(3)


@pytest.mark.parametrize(("who", "where"), [(0, "at once"), (0, "others wait"), (1, "at once")])
def test_writer_ends_with_its_killed_rank_and_checkpoints_are_complete(tmp_path, who, where):
    results = run_ranks(_killed_rank, tmp_path, who, where)
    assert isinstance(results[who], Killed)
    time.sleep(0.2)
    for rank in (0, 1):
        pid = int((tmp_path / f"writer.{rank}").read_text())
        assert _is_gone(pid), (rank, pid)
    committed = [checkpoint.step for checkpoint in checkpoint_files.committed(tmp_path)]
    assert committed in ([1], [1, 2])
    again = Training("plain", seed=9)
    engine = CheckpointEngine(tmp_path, attempt=2)
    assert again.load(engine).step == committed[-1]
    engine.save(again.state(), step=3)
    engine.close()
    assert not [name for name in contents(tmp_path) if name.endswith(".tmp")]


def _is_gone(pid):
    give_up = time.monotonic() + 5
    while time.monotonic() < give_up:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


# -- one process -------------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_state_that_changes_size_between_saves_is_saved_whole(tmp_path):
    engine = CheckpointEngine(tmp_path, keep=None)
    values = [torch.arange(size, dtype=torch.float32) for size in (5, 200_000, 3, 1_000_000)]
    for step, value in enumerate(values, 1):
        engine.save(TrainingState(objects={"x": Holder(value)}), step=step, background=True)
    engine.drain()
    engine.close()
    for step, value in enumerate(values, 1):
        holder = Holder(None)
        engine.load(tmp_path / checkpoint_files.checkpoint_name(step), TrainingState(objects={"x": holder}))
        assert torch.equal(holder.value, value)


def test_snapshot_memory_smaller_than_the_file_streams_the_whole_file(tmp_path):
    pieces = [os.urandom(size) for size in (0, 64, 5000, 1 << 20, 3_000_001, 64)]
    padded = [data + bytes(-len(data) % 64) for data in pieces]
    for number, size in enumerate((1, 4096, 1 << 20, 1 << 24)):
        memory = snapshot_memory.SnapshotMemory(size)
        views = [(memoryview(bytearray(data)), len(whole)) for data, whole in zip(pieces, padded, strict=True)]
        crcs = snapshot_memory.stream(memory, tmp_path / str(number), views)
        assert (tmp_path / str(number)).read_bytes() == b"".join(padded)
        assert crcs == [zlib.crc32(whole) for whole in padded]


def test_snapshot_too_large_for_the_memory_of_the_node_is_refused(monkeypatch):
    free = available_bytes()
    assert free is None or free > 0
    monkeypatch.setattr(snapshot_memory, "available_bytes", lambda: 10_000)
    assert snapshot_memory.no_room(4000, of=2) is None
    assert "per rank (ranks on this node: 3) does not fit in 90% of" in (snapshot_memory.no_room(4000, of=3) or "")


# -- in a training loop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["break", "stop"])
def test_failed_background_save_raises_on_all_ranks_and_last_one_completes(tmp_path, end):
    run = make_run(tmp_path / "run", checkpoint={"every_steps": 4, "when_busy": "skip", "keep": None})
    ended = run_program("background.py", [end], run=run)
    assert ended.codes == ([85, 85] if end == "stop" else [0, 0]), "\n".join(ended.outputs)
    assert "the checkpoint of step 12 is skipped" in ended.outputs[0]
    steps = [checkpoint.step for checkpoint in checkpoint_files.committed(run.checkpoints)]
    told = [line for line, _ in read_lines(run.saves(1))]
    assert [line["step"] for line in told] == steps
    assert steps == ([4, 17, 20, 24] if end == "break" else [4, 17, 20, 24, 25])
    assert [line["background"] for line in told] == [True, True, True, True, False][: len(steps)]
    if end != "stop":
        assert ended.result()["error_at"] == 15
        assert "rank 1: 15" in ended.outputs[1]
        assert "the writer process ended (signal SIGKILL)" in ended.result()["said"]
    assert all(line["bytes"] > 0 and line["seconds"] > 0 and line["stall_seconds"] > 0 for line in told)
    assert contents(run.checkpoints) == [checkpoint_files.checkpoint_name(step) for step in steps]
