"""Exact resume: with any kind of loader, stopped at any step, every later step equals the uninterrupted training's."""

from __future__ import annotations

import random
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcaccel.runtime.data.loader import PreparedLoader
from hpcaccel.runtime.rng.generators import capture, put_back, seed_generators
from tests.runtime.loader_kinds import KINDS, Kind
from tests.runtime.ranks import make_run, metrics, run_ranks
from tests.runtime.test_data import Hooks, prepared

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*(thrown away|set_vital|fork)")]

EPOCHS = 3


class Killed(Exception):
    """Simulates that the process is killed."""


class Loop(Hooks):
    """A training loop that saves, and is killed some steps later.

    Args:
        last_mark_at: step after which the state of streams is no longer recorded; None: recorded at each step.
    """

    def __init__(self, *, save_at: int = -1, kill_at: int = -1, last_mark_at: int | None = None) -> None:
        self.step = 0
        self.save_at, self.kill_at, self.last_mark_at = save_at, kill_at, last_mark_at
        self.loaders: list[PreparedLoader] = []
        self.saved: dict[str, Any] = {}
        self._generators: Any = None
        self.done: list[Any] = []

    def step_is_over(self) -> None:
        if self.step == self.save_at and not self.saved:
            states = [loader.state_dict() for loader in self.loaders]
            self.saved = {"step": self.step, "loaders": states, "generators": capture()}
        if self.step == self.kill_at:
            raise Killed

    def load(self, saved: dict[str, Any]) -> None:
        self.step, self._generators = saved["step"], saved["generators"]
        for loader, state in zip(self.loaders, saved["loaders"], strict=True):
            loader.load_state_dict(state)

    def loop_is_left(self) -> None:
        pass

    def restore_rng(self) -> None:
        if self._generators is not None:
            put_back(self._generators)
            self._generators = None

    def train(self, *batches: torch.Tensor) -> None:
        dropout = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        self.done.append((self.step, [batch.tolist() for batch in batches], dropout))
        self.step += 1
        for loader in self.loaders:
            loader.trains = True
            if self.step == self.last_mark_at:
                loader.bookmark_seconds = float("inf")


def process(kinds: list[Kind], loop: Loop, *, rank: int, size: int, seed: int, saved: Any = None) -> Loop:
    """A simulated training process, whose global generators are seeded with ``seed``."""
    seed_generators(seed)
    loop.loaders = [prepared(kind.make(), rank=rank, size=size, hooks=loop, **kind.options) for kind in kinds]
    for loader in loop.loaders:
        if loader._cursor.order is None and loader._stream.bookmarks is not None:
            loader.bookmark_seconds = 0.0
    if saved is not None:
        loop.load(saved)
    try:
        while min(loader.iteration for loader in loop.loaders) < EPOCHS:
            for batches in zip(*loop.loaders, strict=False):
                loop.train(*batches)
    except Killed:
        pass
    return loop


def check(names: list[str], *, save_at: int, rank: int, size: int, last_mark_at: int | None = None) -> None:
    kinds = [KINDS[name] for name in names]
    before = capture()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = process(kinds, Loop(), rank=rank, size=size, seed=7 + rank).done
            save_at %= len(whole)
            killed = Loop(save_at=save_at, kill_at=save_at + 2, last_mark_at=last_mark_at)
            first = process(kinds, killed, rank=rank, size=size, seed=7 + rank)
            assert first.done == whole[: save_at + 2]
            again = process(kinds, Loop(), rank=rank, size=size, seed=99, saved=first.saved).done
    finally:
        put_back(before)
    wrong = [number for number, (one, other) in enumerate(zip(again, whole[save_at:], strict=True)) if one != other]
    assert not wrong, f"{len(wrong)} of {len(again)} steps differ, the first is {save_at + wrong[0]}"


WITH_WORKERS = [name for name, kind in KINDS.items() if kind.loader.get("num_workers")]
WITHOUT = [name for name in KINDS if name not in WITH_WORKERS]
NEEDED = {("stateful", 2), ("stateful, own generator", 1), ("torchdata", 1), ("torchdata, 2 workers", 2)}
CHEAP = {"stream, persistent", "torchdata, 2 workers"}


def workers_rows() -> list[Any]:
    return [pytest.param(name, marks=[] if name in CHEAP else [pytest.mark.chaos]) for name in WITH_WORKERS]


def need_torchdata(name: str) -> None:
    if "torchdata" in name:
        pytest.importorskip("torchdata")


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize("size", [1, 2])
def test_resume_without_workers_is_exact(name: str, size: int) -> None:
    need_torchdata(name)
    for save_at in (1, 5, 14):
        check([name], save_at=save_at, rank=size - 1, size=size)


@pytest.mark.parametrize("name", workers_rows())
def test_resume_with_workers_is_exact(name: str) -> None:
    need_torchdata(name)
    check([name], save_at=9, rank=1, size=2)


MARKED = [
    pytest.param(name, size, marks=[] if (name, size) in NEEDED else [pytest.mark.chaos])
    for name in KINDS
    if name.startswith(("stateful", "torchdata")) and name != "stateful, 2 workers"
    for size in (1, 2)
]


@pytest.mark.parametrize(("name", "size"), MARKED)
def test_resume_is_exact_if_the_stream_state_is_older_than_the_save(name: str, size: int) -> None:
    """Samples read since that state are read again and discarded."""
    need_torchdata(name)
    check([name], save_at=5, rank=size - 1, size=size, last_mark_at=2)


@pytest.mark.parametrize(
    "names", [["map", "stream"], ["stateful", "map, own batches"], ["stream", "stateful"]], ids=" and ".join
)
def test_resume_with_two_loaders_per_step_is_exact(names: list[str]) -> None:
    """One loader has already returned a batch when the other one starts."""
    check(names, save_at=5, rank=0, size=1)


@pytest.mark.chaos
@pytest.mark.parametrize("name", KINDS)
def test_resume_from_random_steps_is_exact(name: str) -> None:
    """The steps are drawn at random with a fixed seed."""
    need_torchdata(name)
    draws = random.Random(name)
    for _ in range(6):
        size = draws.choice([1, 2] if "split" in name else [1, 2, 3])
        check([name], save_at=draws.randrange(1, 20), rank=draws.randrange(size), size=size)


def resumed_steps(path: Path, arguments: list[str], *, size: int, background: bool = False) -> tuple[str, list[int]]:
    """Ranks that save every 5 steps and are killed at step 7: the output of the second attempt, and the steps that
    differ from those of an uninterrupted run."""
    schedule = {"every_steps": 5, "keep": None, "background": background}
    whole, killed = make_run(path / "whole", checkpoint=schedule), make_run(path / "killed", checkpoint=schedule)
    assert run_ranks("exact.py", arguments, size=size, run=whole).codes == [0] * size
    told = [*arguments, "--kill-at", "7"]
    assert run_ranks("exact.py", told, size=size, run=killed).codes == [-signal.SIGKILL] * size
    second = run_ranks("exact.py", told, size=size, run=killed, attempt=2)
    assert second.codes == [0] * size, second.outputs[0]
    expected = [metrics(whole, name) for name in ("loss", "x")]
    found = [metrics(killed, name) for name in ("loss", "x")]
    assert list(found[0]) == list(expected[0])
    return second.outputs[0], [
        step for step in found[0] if any(f[step] != e[step] for f, e in zip(found, expected, strict=True))
    ]


PROCESSES = [
    pytest.param(["--kind", "stream"], 1, id="stream"),
    pytest.param(["--kind", "map", "--dispatch"], 2, id="map of rank 0"),
    pytest.param(["--kind", "map, walked, triples", "--dispatch"], 2, id="map, walked, triples of rank 0"),
    pytest.param(
        ["--kind", "torchdata, 2 workers", "--bookmark", "0"], 1, id="torchdata, 2 workers", marks=pytest.mark.chaos
    ),
    *(
        pytest.param(["--kind", name, "--dispatch"], 2, id=f"{name} of rank 0", marks=pytest.mark.chaos)
        for name in KINDS
        if name not in ("map", "map, walked, triples") and "split" not in name
    ),
]


@pytest.mark.parametrize(("arguments", "size"), PROCESSES)
def test_steps_of_killed_ranks_are_identical_after_a_resume(tmp_path: Path, arguments: list[str], size: int) -> None:
    need_torchdata(arguments[1])
    said, wrong = resumed_steps(tmp_path, arguments, size=size)
    assert "resumed at step 5" in said
    assert wrong == []
