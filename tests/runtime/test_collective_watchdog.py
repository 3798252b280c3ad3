"""The collective watchdog without processes: the store is a dict, the collective an object that never completes."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hpcaccel.errors import RankFailed, RuntimeMisuse  # noqa: E402
from hpcaccel.runtime.distributed.collectives.collective_watchdog import CALLS, TICKS, CollectiveWatchdog  # noqa: E402

pytestmark = pytest.mark.torch


class Store:
    """The operations of a TCPStore, on a dict."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        value = int(self.values.get(key, b"0")) + amount
        self.set(key, str(value))
        return value

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        if key not in self.values and not expected:
            self.set(key, value)
        return self.values[key]


class Broken:
    """A store whose connection is lost."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> None:
            raise RuntimeError("Connection reset by peer")

        return fail


class Never:
    """A collective with a missing rank; it completes after ``polls`` polls."""

    def __init__(self, polls: int = 10**9) -> None:
        self.polls = polls

    def wait(self, timeout: Any = None) -> None:
        self.polls -= 1
        if self.polls > 0:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self.polls <= 0


class Lost:
    """A collective that has failed."""

    def wait(self, timeout: Any = None) -> None:
        raise RuntimeError("[/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:5. This is typically caused by")

    def is_completed(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCACCEL_PATIENCE_SECONDS", "0")
    monkeypatch.setattr("hpcaccel.runtime.distributed.collectives.collective_watchdog.FAILURE_REASON_SECONDS", 0.05)


def make(rank: int = 0, size: int = 2, store: Any = None, timeout: float = 60) -> CollectiveWatchdog:
    return CollectiveWatchdog(rank=rank, world_size=size, store=store or Store(), timeout_seconds=timeout)


def publishes(store: Store, rank: int, *, calls: int = 0, ticks: int = 0, **more: Any) -> None:
    store.set(f"status/{rank}", json.dumps({"entered": {CALLS: calls, TICKS: ticks}, **more}))


def wait(watchdog: CollectiveWatchdog, work: Any, channel: str = CALLS) -> None:
    watchdog.wait(work, "gather", channel=channel, number=watchdog.enter(channel))


def test_collective_that_completes_in_time_does_not_use_the_store() -> None:
    store = Store()
    wait(make(store=store), Never(polls=0))
    assert store.values == {}


def test_wait_for_a_late_rank_is_published_and_then_withdrawn() -> None:
    store = Store()
    publishes(store, 1, calls=0)  # has not made the call, and is not waiting
    wait(make(store=store), Never(polls=4))
    assert json.loads(store.values["status/0"]) == {"entered": {CALLS: 1}}


def test_two_ranks_that_wait_for_each_other_raise_an_error() -> None:
    store = Store()
    publishes(store, 1, ticks=5, channel=TICKS, number=5, what="a step", site="train.py:9")
    with pytest.raises(RuntimeMisuse, match=r"test_collective_watchdog\.py:\d+ for rank 1, .* a step at train\.py:9"):
        wait(make(store=store), Never())


def test_rank_that_waits_for_a_third_rank_is_not_a_deadlock() -> None:
    store = Store()
    # Rank 1 waits for a tick that this rank issued long ago: a third rank is late.
    publishes(store, 1, ticks=1, channel=TICKS, number=1, what="a step", site="train.py:9")
    watchdog = make(store=store, size=3)
    watchdog.enter(TICKS)
    wait(watchdog, Never(polls=4))


def test_departed_rank_that_has_made_the_call_is_not_missing() -> None:
    store = Store()
    publishes(store, 1, calls=1, departure="has reached the end of the program")
    wait(make(store=store, size=3), Never(polls=4))


def test_waiting_for_a_rank_at_the_end_of_its_program_raises_an_error() -> None:
    store = Store()
    make(rank=1, store=store).publish_departure("has reached the end of the program")
    with pytest.raises(
        RuntimeMisuse, match="rank 1, which has reached the end of the program without making this call"
    ):
        wait(make(store=store), Never())


def test_end_barrier_returns_none_or_the_reason_it_is_incomplete() -> None:
    store = Store()
    first, second = make(store=store), make(rank=1, store=store)
    assert first.end_barrier.wait(0.05) == "only 1 of 2 ranks reached the end of the program within 0 s"
    assert second.end_barrier.wait(60) is None
    first.publish_failure("at train.py:3: ValueError: x")
    assert second.end_barrier.wait(60) == "a rank has failed"
    assert "the connection to the ranks' store was lost" in str(make(store=Broken()).end_barrier.wait(60))


def test_ranks_at_end_lists_ranks_with_the_line_where_they_left_their_loop() -> None:
    store = Store()
    watchdog, other = make(store=store), make(rank=1, store=store)
    other.left_at = "train.py:20"
    other.publish_end()
    assert watchdog.ranks_at_end() == ["rank 1 has reached the end of the program (it left its loop at train.py:20)"]
    other.publish_failure("at train.py:3: ValueError: x")
    assert watchdog.ranks_at_end() == []


def test_waiting_for_a_failed_rank_raises_rank_failed() -> None:
    store = Store()
    make(rank=1, store=store).publish_departure("has failed at train.py:3: ValueError: x")
    with pytest.raises(RankFailed, match=r"rank 1, which has failed at train\.py:3: ValueError: x"):
        wait(make(store=store), Never())


def test_abort_ends_the_calls_of_other_ranks_and_all_later_calls() -> None:
    store = Store()
    first = make(store=store, timeout=0.01)
    with pytest.raises(RuntimeMisuse, match=r"for rank 1 of 2 and reached the time limit"):
        wait(first, Never())
    with pytest.raises(RuntimeMisuse, match="an earlier collective call failed"):
        first.enter()
    with pytest.raises(RuntimeMisuse, match=r"rank 1 is waiting in gather at .*rank 0 has waited 0 s in gather"):
        wait(make(rank=1, store=store), Never(), TICKS)


def test_lost_connection_is_explained_by_the_status_of_the_other_rank() -> None:
    store = Store()
    publishes(store, 1, departure="has failed at train.py:3: ValueError: x")
    with pytest.raises(RankFailed, match=r"ValueError: x \(Connection closed by peer \[10\.0\.0\.1\]:5\)"):
        wait(make(store=store), Lost())
    with pytest.raises(RankFailed, match="the connection to another rank was lost"):
        wait(make(store=Store()), Lost())


def test_lost_store_does_not_hide_the_timeout_error() -> None:
    with pytest.raises(RuntimeMisuse, match="and reached the time limit"):
        wait(make(store=Broken(), timeout=0.01), Never())


def test_long_wait_prints_the_missing_ranks(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("hpcaccel.runtime.distributed.collectives.collective_watchdog.WARNING_SECONDS", 0.0)
    wait(make(size=4), Never(polls=5))
    said = capsys.readouterr().err
    assert said.count("hpcaccel: rank 0 has waited") == 1
    assert "for ranks 1-3 of 4. The time limit is 60 s" in said
