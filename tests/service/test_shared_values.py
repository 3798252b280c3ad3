"""Values that viewers share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpcaccel.service.shared_values import SharedValues


def test_viewers_at_the_same_time_share_one_computation() -> None:
    values: SharedValues[int] = SharedValues(seconds=3600, most=10)
    calls: list[int] = []
    start = threading.Barrier(20)

    def look(_: int) -> int:
        start.wait(timeout=60)
        return values.get("run", lambda: calls.append(1) or 7)

    with ThreadPoolExecutor(20) as pool:
        assert set(pool.map(look, range(20))) == {7}
    assert len(calls) == 1
    values.forget()
    assert values.get("run", lambda: 8) == 8


def test_errors_are_not_kept_and_old_values_are_dropped() -> None:
    values: SharedValues[int] = SharedValues(seconds=3600, most=2)
    with pytest.raises(ZeroDivisionError):
        values.get("a", lambda: 1 // 0)
    assert [values.get(key, lambda: 1) for key in "abc"] == [1, 1, 1]
    assert values.get("c", lambda: 2) == 1
    assert values.get("a", lambda: 2) == 2
