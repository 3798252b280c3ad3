"""Iterable datasets (streams): each rank's part, and resuming in the middle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hpcaccel.runtime.data import iterable
from hpcaccel.runtime.data.batch_samplers import skip_first_batches
from hpcaccel.runtime.data.loader import PreparedLoader
from tests.runtime.test_data import prepared

pytestmark = pytest.mark.torch

GOLDEN = json.loads((Path(__file__).parents[1] / "data/sharding/golden.json").read_text())


class Stream(IterableDataset[int]):
    def __init__(self, samples: int = 14) -> None:
        self.samples = samples
        self.read = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, self.samples, step):
            self.read += 1
            yield number


def make(rank: int = 0, size: int = 2, data: Any = None, batch_size: Any = 2, **options: Any) -> PreparedLoader:
    own = {name: options.pop(name) for name in list(options) if name in ("num_workers", "drop_last")}
    loader: DataLoader[Any] = DataLoader(data or Stream(), batch_size=batch_size, **own)
    return prepared(loader, rank=rank, size=size, **options)


def values(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def test_ranks_read_the_same_samples_as_with_accelerate() -> None:
    for case, expected in GOLDEN["streams"].items():
        samples, batch_size, size, split, drop_last = map(int, case.split("/"))
        for rank in range(size):
            loader = make(rank, size, Stream(samples), batch_size, split_batches=bool(split), drop_last=bool(drop_last))
            assert list(chain(*values(loader))) == expected[rank], case


def test_valid_in_batch_and_at_last_batch_of_a_stream() -> None:
    for workers in (0, 1):
        loaders = [make(rank, num_workers=workers) for rank in range(2)]
        found = [
            [(loader.valid_in_batch, loader.batch_samples, loader.at_last_batch) for _ in loader] for loader in loaders
        ]
        assert found[0] == [(None, 2, False)] * 3 + [(None, 2, True)]
        assert found[1] == [(None, 2, False)] * 3 + [(0, 2, True)]


def test_uneven_batches_give_each_sample_to_one_rank() -> None:
    assert [values(make(rank, even_batches=False)) for rank in range(2)] == [
        [[0, 1], [4, 5], [8, 9], [12, 13]],
        [[2, 3], [6, 7], [10, 11]],
    ]


def test_batches_made_by_the_dataset_are_distributed_whole() -> None:
    class Batches(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return (torch.full((number + 1,), number) for number in range(3))

    loaders = [make(rank, data=Batches(), batch_size=None) for rank in range(2)]
    assert [values(loader) for loader in loaders] == [[[0], [2, 2, 2]], [[1, 1], [0]]]
    assert [loader.valid_in_batch for loader in loaders] == [None, 0]


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_without_state_is_read_forward_with_a_warning(workers: int) -> None:
    whole = values(make(1, data=Stream(32), num_workers=workers))
    stopped = make(1, data=Stream(32), num_workers=workers)
    batches = iter(stopped)
    next(batches)
    next(batches)
    resumed = make(1, data=Stream(32), num_workers=workers)
    resumed.load_state_dict(stopped.state_dict())
    with pytest.warns(UserWarning, match=r"8 samples are read and discarded.*state_dict\(\)"):
        assert values(resumed) == whole[2:]
    assert resumed.dataset.epochs == [0]  # type: ignore[attr-defined]


def test_stream_resumed_on_more_ranks_reads_each_sample_once() -> None:
    stopped = make(0, data=Stream(24))
    batches = iter(stopped)
    seen = [*next(batches).tolist(), 2, 3]
    for rank in range(3):
        resumed = make(rank, 3, data=Stream(24))
        resumed.load_state_dict(stopped.state_dict())
        with pytest.warns(UserWarning, match="4 samples"):
            seen += [sample for batch in resumed for sample in batch.tolist()[: resumed.valid_in_batch]]
    assert sorted(seen) == list(range(24))


class Stateful(Stream):
    """A stream with ``state_dict()``."""

    def __init__(self, samples: int = 14) -> None:
        super().__init__(samples)
        self.place = 0
        self._start = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = state["place"]

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        for number in range(start, self.samples):
            self.place = number + 1
            self.read += 1
            yield number


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
@pytest.mark.parametrize("size", [1, 2])
def test_stateful_stream_resumes_at_its_position(monkeypatch: pytest.MonkeyPatch, seconds: float, size: int) -> None:
    """With its state recorded at every batch, or never."""
    monkeypatch.setattr(iterable, "BOOKMARK_SECONDS", seconds)
    last = size - 1
    whole = values(make(last, size, data=Stateful(40)))
    stopped = make(last, size, data=Stateful(40))
    batches = iter(stopped)
    for _ in range(4):
        next(batches)
    state = stopped.state_dict()
    again = make(last, size, data=Stateful(40))
    again.load_state_dict(state)
    assert values(again) == whole[4:]
    read = again.dataset.read  # type: ignore[attr-defined]
    assert read == 40 - (8 * size if seconds == 0.0 else 0)
    assert values(again) == whole


def test_stateful_loader_saves_and_loads_its_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like torchdata's: its state is that after the last batch of its iterator."""

    class Loader(DataLoader[Any]):
        asked = 0
        given = 0
        start = 0

        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            start, self.start = self.start, 0
            for number, batch in enumerate(super().__iter__()):
                self.given = number + 1
                if number >= start:
                    yield batch

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return {"given": self.given}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.start = state["given"]

    def make_own(rank: int) -> PreparedLoader:
        return prepared(Loader(Stream(30), batch_size=2), rank=rank, size=2)

    whole = [values(make_own(rank)) for rank in range(2)]
    assert whole[0][-1] == [28]
    assert whole[1][-1] == [29]
    quick = make_own(0)
    assert values(quick) == whole[0]
    assert quick.asked == 0
    monkeypatch.setattr(iterable, "BOOKMARK_SECONDS", 0.0)
    for rank in range(2):
        stopped = make_own(rank)
        batches = iter(stopped)
        for _ in range(3):
            next(batches)
        resumed = make_own(rank)
        resumed.load_state_dict(stopped.state_dict())
        assert values(resumed) == whole[rank][3:]


def test_skip_first_batches_of_a_stream() -> None:
    later = skip_first_batches(make(1), 2)
    assert values(later) == [[10, 11], [0, 1]]
    plain = skip_first_batches(skip_first_batches(DataLoader(Stream(), batch_size=4), 1), 1)
    assert values(plain) == [[8, 9, 10, 11], [12, 13]]
    assert isinstance(plain, DataLoader)


def test_reading_forward_prints_its_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(iterable, "QUIET_SECONDS", 0.0)
    show = iterable.SkipProgress("reading forward", shown=True)
    list(iterable.forward(range(10), 4, show))
    assert "reading forward: 1 of 4 (25%)" in capsys.readouterr().err


@pytest.mark.parametrize("shown", [True, False])
def test_skip_progress_calls_meanwhile_every_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shown: bool
) -> None:
    now = 0.0
    monkeypatch.setattr("hpcaccel.runtime.data.iterable.time.monotonic", lambda: now)
    called: list[float] = []
    progress = iterable.SkipProgress("skipping", shown=shown, meanwhile=lambda: called.append(now))
    for second in range(1, 61):
        now = float(second)
        progress(second, 100)
    assert called == [float(second) for second in range(2, 61, 2)]
    assert len(capsys.readouterr().err.splitlines()) == (2 if shown else 0)
