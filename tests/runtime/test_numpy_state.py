"""The state of numpy's global generator: reading does not change it, writing restores it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hpcaccel.runtime.rng import generators
from hpcaccel.runtime.rng.generators import read_numpy, write_numpy

pytestmark = pytest.mark.torch
_random: Any = np.random


@pytest.fixture(autouse=True)
def bit_generator_of_the_others() -> Iterator[None]:
    before, state = _random.get_bit_generator(), np.random.get_state()
    yield
    _random.set_bit_generator(before)
    np.random.set_state(state)


def draws() -> list[Any]:
    return [np.random.randn(), np.random.rand(700).tolist(), np.random.randn(), np.random.randint(10)]


@pytest.mark.parametrize("draw", [lambda: None, np.random.randn, np.random.rand, lambda: np.random.rand(312)])
@pytest.mark.parametrize("known", [True, False])
def test_numpy_state_is_restored(draw: Any, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a cached normal draw, and where the generator's memory layout is unknown."""
    if not known:
        monkeypatch.setattr(generators, "_memory_layout_is_known", lambda: False)
    np.random.seed(5)
    draw()
    expected = draws()
    np.random.seed(5)
    draw()
    state = read_numpy()
    assert draws() == expected
    for seed in (6, 7):
        np.random.seed(seed)
        np.random.randn()
        write_numpy(state)
        assert draws() == expected
    assert isinstance(state, bytes) == (known and draw is not np.random.randn)


def test_state_of_another_bit_generator_is_restored() -> None:
    _random.set_bit_generator(np.random.PCG64(3))
    state = read_numpy()
    expected = draws()
    np.random.rand()
    write_numpy(state)
    assert draws() == expected
