"""torchdata's StatefulDataLoader: resume with and without workers, with frequent and with rare states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hpcaccel.runtime.data import iterable
from hpcaccel.runtime.data.loader import PreparedLoader
from tests.runtime.test_data import prepared

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*set_vital")]

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")


class Stream(IterableDataset[int]):
    """A stream that is split between its workers and has a state in each."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self.place * step + first < 40:
            self.place += 1
            yield (self.place - 1) * step + first
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("given", [True, False])
def test_stateful_loader_resumes_exactly_where_it_was(
    monkeypatch: pytest.MonkeyPatch, seconds: float, workers: int, given: bool
) -> None:
    monkeypatch.setattr(iterable, "BOOKMARK_SECONDS", seconds)

    def make() -> PreparedLoader:
        kind = stateful_dataloader.StatefulDataLoader if given else DataLoader
        return prepared(kind(Stream(), batch_size=2, num_workers=workers), rank=1, size=2, stateful=not given)

    whole = [batch.tolist() for batch in make()]
    stopped = make()
    batches = iter(stopped)
    for _ in range(4):
        next(batches)
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    assert [batch.tolist() for batch in resumed] == whole[4:]
