"""Who waits for whom, told apart without any processes: the store is a dict, the collective a thing that never ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hpcaccel.errors import RankFailed, RuntimeMisuse  # noqa: E402
from hpcaccel.runtime.distributed.collectives.collective_watchdog import CALLS, TICKS, Rollcall  # noqa: E402

pytestmark = pytest.mark.torch


class Store:
    """What a TCPStore does with keys and values."""

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
    """A store whose host has gone."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> None:
            raise RuntimeError("Connection reset by peer")

        return fail


class Never:
    """A collective to which somebody does not come; it ends after so many looks."""

    def __init__(self, looks: int = 10**9) -> None:
        self.looks = looks

    def wait(self, timeout: Any = None) -> None:
        self.looks -= 1
        if self.looks > 0:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self.looks <= 0


class Lost:
    """A collective that has failed."""

    def wait(self, timeout: Any = None) -> None:
        raise RuntimeError("[/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:5. This is typically caused by")

    def is_completed(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCACCEL_PATIENCE_SECONDS", "0")
    monkeypatch.setattr("hpcaccel.runtime.distributed.collectives.collective_watchdog.LAST_WORD_SECONDS", 0.05)


def make(rank: int = 0, size: int = 2, store: Any = None, timeout: float = 60) -> Rollcall:
    return Rollcall(rank=rank, world_size=size, store=store or Store(), timeout_seconds=timeout)


def says(store: Store, rank: int, *, calls: int = 0, ticks: int = 0, **more: Any) -> None:
    store.set(f"said/{rank}", json.dumps({"entered": {CALLS: calls, TICKS: ticks}, **more}))


def wait(rollcall: Rollcall, work: Any, channel: str = CALLS) -> None:
    rollcall.wait(work, "gather", channel=channel, number=rollcall.enter(channel))


def test_who_comes_in_time_reads_and_writes_nothing() -> None:
    store = Store()
    wait(make(store=store), Never(looks=0))
    assert store.values == {}


def test_a_rank_that_is_late_is_waited_for_and_what_was_said_is_taken_back() -> None:
    store = Store()
    says(store, 1, calls=0)  # it has not come, and waits for nothing
    wait(make(store=store), Never(looks=4))
    assert json.loads(store.values["said/0"]) == {"entered": {CALLS: 1}}


def test_two_ranks_that_wait_for_each_other() -> None:
    store = Store()
    says(store, 1, ticks=5, channel=TICKS, number=5, what="a step", site="train.py:9")
    with pytest.raises(RuntimeMisuse, match=r"test_collective_watchdog\.py:\d+ for rank 1, .* a step at train\.py:9"):
        wait(make(store=store), Never())


def test_a_rank_that_waits_for_somebody_else_may_still_come() -> None:
    store = Store()
    # It waits for the tick that this rank has issued long ago: a third rank is late.
    says(store, 1, ticks=1, channel=TICKS, number=1, what="a step", site="train.py:9")
    rollcall = make(store=store, size=3)
    rollcall.enter(TICKS)
    wait(rollcall, Never(looks=4))


def test_a_rank_that_has_been_there_already_is_not_the_one_that_is_missing() -> None:
    store = Store()
    says(store, 1, calls=1, gone="has reached the end of the program")
    wait(make(store=store, size=3), Never(looks=4))


def test_a_rank_that_has_gone() -> None:
    store = Store()
    make(rank=1, store=store).say_gone("has reached the end of the program")
    with pytest.raises(RuntimeMisuse, match="rank 1, which has reached the end of the program without coming"):
        wait(make(store=store), Never())


def test_the_end_of_the_program_is_waited_for_without_a_collective() -> None:
    store = Store()
    first, second = make(store=store), make(rank=1, store=store)
    assert first.meet_at_end(0.05) == "1 of 2 ranks have come to the end of the program in 0 s"
    assert second.meet_at_end(60) is None
    first.say_failed("at train.py:3: ValueError: x")
    assert second.meet_at_end(60) == "a rank has failed"
    assert "the ranks' store has gone" in str(make(store=Broken()).meet_at_end(60))


def test_who_has_come_to_the_end_is_told_with_the_line_where_it_left() -> None:
    store = Store()
    rollcall, other = make(store=store), make(rank=1, store=store)
    other.left_at = "train.py:20"
    other.say_at_end()
    assert rollcall.who_has_gone() == ["rank 1 has reached the end of the program (it left its loop at train.py:20)"]
    other.say_failed("at train.py:3: ValueError: x")
    assert rollcall.who_has_gone() == []


def test_a_rank_that_has_failed() -> None:
    store = Store()
    make(rank=1, store=store).say_gone("has failed at train.py:3: ValueError: x")
    with pytest.raises(RankFailed, match=r"rank 1, which has failed at train\.py:3: ValueError: x"):
        wait(make(store=store), Never())


def test_who_gives_up_leaves_word_and_cannot_go_on() -> None:
    store = Store()
    first = make(store=store, timeout=0.01)
    with pytest.raises(RuntimeMisuse, match=r"for rank 1 of 2, which is the limit"):
        wait(first, Never())
    with pytest.raises(RuntimeMisuse, match="an earlier call has failed"):
        first.enter()
    with pytest.raises(RuntimeMisuse, match=r"rank 1 waits in gather at .*rank 0 has waited 0 s in gather"):
        wait(make(rank=1, store=store), Never(), TICKS)


def test_a_lost_connection_is_explained_by_what_the_others_said() -> None:
    store = Store()
    says(store, 1, gone="has failed at train.py:3: ValueError: x")
    with pytest.raises(RankFailed, match=r"ValueError: x \(Connection closed by peer \[10\.0\.0\.1\]:5\)"):
        wait(make(store=store), Lost())
    with pytest.raises(RankFailed, match="another rank has gone"):
        wait(make(store=Store()), Lost())


def test_a_store_that_has_gone_does_not_hide_the_timeout() -> None:
    with pytest.raises(RuntimeMisuse, match="which is the limit"):
        wait(make(store=Broken(), timeout=0.01), Never())


def test_after_a_while_it_says_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("hpcaccel.runtime.distributed.collectives.collective_watchdog.WARNING_SECONDS", 0.0)
    wait(make(size=4), Never(looks=5))
    said = capsys.readouterr().err
    assert said.count("hpcaccel: rank 0 has waited") == 1
    assert "for ranks 1-3 of 4. The limit is 60 s" in said
