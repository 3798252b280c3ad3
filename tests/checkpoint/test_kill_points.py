"""Kill a process at each system call of a save: the checkpoint found afterwards loads and is complete.

strace kills on entry to a chosen call, so the code needs no hooks and any moment can be chosen: before the directory is
created, in the middle of a file, before its fsync, before the index, the manifest, the rename, and while old
checkpoints are deleted.
"""

from __future__ import annotations

import collections
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import CheckpointEngine, TrainingState, rank_blocks
from hpcaccel.errors import CheckpointError
from tests.checkpoint.world import Killed, run_ranks

CALLS = "mkdir,write,link,linkat,unlink,pwrite64,fsync,fdatasync,ftruncate,fallocate,rename,unlinkat,rmdir"
POINTS = {"rank 0": 8, "rank 1": 3, "writer 0": 6, "writer 1": 3}
"""Number of kill points in each of the four processes that take part in a save of two ranks."""
WRITING_PARTS = 20
"""Calls before the commit of a save of two blocks: rank 0 or its writer writes the parts of index and manifest."""
FROZEN = 2
"""Number of layers that do not change, so that the second save in the background links the first one's files."""


def has_strace() -> bool:
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False).returncode == 0


needs_strace = pytest.mark.skipif(not has_strace(), reason="needs strace, and the right to trace")


def state_of(step: int) -> tuple[nn.Module, TrainingState]:
    """A model whose parameters all equal ``step``, except that those of the first two layers are 7 in every save, and
    its state."""
    layers = [nn.Linear(300, 300), nn.Linear(300, 200), nn.Linear(200, 300)]
    model = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 700), *layers)
    with torch.no_grad():
        for number, layer in enumerate(model):
            for parameter in layer.parameters():
                parameter.fill_(7 if number < FROZEN and step else step)
    return model, TrainingState([model], per_rank={"step": step})


def values(model: nn.Module) -> set[float]:
    """The values of the layers that are not frozen."""
    layers = model.children()
    found = [{float(value) for one in layer.parameters() for value in one.detach().unique()} for layer in layers]
    assert found[:FROZEN] == [{7.0}] * FROZEN
    return set().union(*found[FROZEN:])


@contextmanager
def traced(process: int, *options: str):
    """Trace ``process`` and all its threads with strace inside the block."""
    tracer = subprocess.Popen(["strace", "-f", "-qq", "-p", str(process), "-e", f"trace={CALLS}", *options])
    try:
        while not all("TracerPid:\t0\n" not in text for text in _statuses(process)):
            assert tracer.poll() is None
            time.sleep(0.002)
        yield
    finally:
        tracer.terminate()
        tracer.wait()


def _statuses(process: int) -> list[str]:
    return [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/status")]


def writer_of(process: int) -> int:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return next(int(child) for child in children if b"checkpoint.writer" in Path(f"/proc/{child}/cmdline").read_bytes())


def _save(rank: int, directory: Path, victim: str, block: int, options: list[str]) -> str:
    """Save step 1 undisturbed, then step 2 with the victim under strace; ``block`` ranks form a block."""
    rank_blocks.BLOCK = block
    who, number = victim.split()
    engine = CheckpointEngine(directory, rank=rank, world_size=2, attempt=1, keep=1)
    background = who == "writer"
    engine.save(state_of(1)[1], step=1, background=background)
    engine.drain()
    if rank != int(number):
        return _second(engine, background=background)
    with traced(writer_of(os.getpid()) if background else os.getpid(), *options):
        return _second(engine, background=background)


def _second(engine: CheckpointEngine, *, background: bool) -> str:
    """Save step 2; return its error, if any. After an error, which only a dead writer causes, save step 3."""
    try:
        engine.save(state_of(2)[1], step=2, background=background)
        engine.drain()
    except CheckpointError as error:
        assert background, error  # noqa: PT017  # in a process of its own
        engine.save(state_of(3)[1], step=3, background=True)
        engine.drain()
        return str(error)
    finally:
        engine.close()
    return ""


@needs_strace
@pytest.mark.parametrize("victim", POINTS)
def test_kill_at_twenty_points_leaves_complete_checkpoints(tmp_path: Path, victim: str) -> None:
    every = points_of(victim, tmp_path)
    wanted = min(POINTS[victim], len(every))
    kill_at([every[number * (len(every) - 1) // (wanted - 1)] for number in range(wanted)], victim, tmp_path)


@needs_strace
@pytest.mark.parametrize("victim", ["rank 0", "writer 0"])
def test_kill_while_the_parts_of_the_manifest_are_written_leaves_complete_checkpoints(
    tmp_path: Path, victim: str
) -> None:
    points = points_of(victim, tmp_path, block=1, before='/step_00000002"')
    kill_at(points[-WRITING_PARTS::3], victim, tmp_path, block=1)


@needs_strace
@pytest.mark.chaos
@pytest.mark.parametrize("block", [1, 64])
@pytest.mark.parametrize("victim", POINTS)
def test_kill_at_every_point_leaves_complete_checkpoints(tmp_path: Path, victim: str, block: int) -> None:
    kill_at(points_of(victim, tmp_path, block=block), victim, tmp_path, block=block)


def points_of(victim: str, folder: Path, *, block: int = 64, before: str | None = None) -> list[tuple[str, int]]:
    """Calls of an undisturbed save in order, each with its count in its thread, as strace counts them.

    Args:
        block: ranks of a block.
        before: only those before the first call with this text.
    """
    log = folder / "calls"
    assert run_ranks(_save, folder / "whole", victim, block, ["-o", str(log)]) == ["", ""]
    assert (folder / "whole" / "step_00000002" / "ranges.json").exists() == (block == 1)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    found: dict[tuple[str, int], None] = {}
    for line in log.read_text().splitlines():
        if before is not None and before in line:
            break
        if match := re.match(r"(\d+) +(\w+)\(", line):
            thread, call = match.groups()
            counts[thread, call] += 1
            found[call, counts[thread, call]] = None
    assert len(found) >= 3, log.read_text()
    assert victim.startswith("rank") or {"link", "linkat"} & {call for call, _ in found}, log.read_text()
    return list(found)


def kill_at(points: list[tuple[str, int]], victim: str, folder: Path, *, block: int = 64) -> None:
    for call, number in points:
        directory = folder / f"{call} {number}"
        inject = ["-o", "/dev/null", "-e", f"inject={call}:signal=KILL:when={number}"]
        results = run_ranks(_save, directory, victim, block, inject)
        assert_whole(directory, results, victim, f"{victim}, {call} number {number}: {results}")


def assert_whole(directory: Path, results: list, victim: str, what: str) -> None:
    assert "hangs" not in str(results), what
    if victim.startswith("rank"):
        killed = results[int(victim[-1])]
        # The number of writes per file depends on the speed of the disk: a later one may not occur this time.
        if not (killed == "" and "pwrite64 number" in what and "pwrite64 number 1:" not in what):
            assert isinstance(killed, Killed), what
            assert killed.args == (-signal.SIGKILL,), what
    committed = [found.step for found in checkpoint_files.committed(directory)]
    newest = max(committed)
    assert newest in ((1, 2) if victim.startswith("rank") else (2, 3)), what
    model, state = state_of(0)
    engine = CheckpointEngine(directory, attempt=2, keep=1)
    assert engine.load(engine.find(), state).step == newest, what
    assert values(model) == {newest}, what
    assert not list(directory.glob("quarantined_*")), what
    engine.save(state_of(newest + 1)[1], step=newest + 1)
    engine.close()
    assert [path.name for path in directory.iterdir()] == [checkpoint_files.checkpoint_name(newest + 1)], what


def _until_killed(rank: int, directory: Path, crash: int) -> None:
    """Resume, save every step in the background, and die at a random moment after the first save."""
    dice = random.Random(crash)
    engine = CheckpointEngine(directory, rank=rank, world_size=2, attempt=crash, keep=1)
    model, state = state_of(0)
    found, step = engine.find(), 0
    if found is not None:
        step = engine.load(found, state).step
        assert values(model) == {step}
    assert (found is None) == (crash == 0)
    for number in itertools.count():
        step += 1
        engine.save(state_of(step)[1], step=step, background=True)
        if number == 1 and rank == dice.randrange(2):
            threading.Timer(dice.uniform(0, 0.2), os.kill, (os.getpid(), signal.SIGKILL)).start()


@pytest.mark.chaos
def test_ten_crashes_in_a_row_with_keep_one_lose_no_progress(tmp_path: Path) -> None:
    steps = [0]
    for crash in range(10):
        results = run_ranks(_until_killed, tmp_path, crash)
        assert "hangs" not in str(results)
        assert any(isinstance(result, Killed) for result in results)
        assert all("AssertionError" not in str(result) for result in results), results
        steps.append(max(found.step for found in checkpoint_files.committed(tmp_path)))
    assert steps == sorted(set(steps)), "each attempt got further"
    assert not list(tmp_path.glob("quarantined_*"))
