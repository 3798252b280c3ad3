"""The state of numpy's global generator, read and written by copying its memory.

``numpy.random.get_state`` and ``set_state`` go through it word by word, which takes longer than many a small batch. The
memory is that of the Mersenne twister alone: the normal number that the global generator holds back, of the two that it
draws at a time, is found by drawing one.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

__all__ = ["read_numpy", "write_numpy"]

_random: Any = np.random
"""Numpy's hints leave out get_bit_generator and set_bit_generator."""
_WORDS = 624
_Memory = ctypes.c_char * (4 * (_WORDS + 1))
"""The words, and the place in them."""


def read_numpy() -> Any:
    """The state, for ``write_numpy``."""
    bits: Any = _random.get_bit_generator()
    if type(bits) is not np.random.MT19937 or not _is_laid_out_so():
        return np.random.get_state(legacy=False)
    memory = _Memory.from_address(bits.ctypes.state_address)
    state = memory.raw
    normal = np.random.standard_normal()
    if memory.raw == state:
        found = ("MT19937", np.frombuffer(state, np.uint32, _WORDS).copy(), _place(state), 1, normal)
        np.random.set_state(found)
        return found
    memory.raw = state
    _forget_normal(bits)
    return state


def write_numpy(state: Any) -> None:
    """Set it to what ``read_numpy`` has found."""
    bits: Any = _random.get_bit_generator()
    if not isinstance(state, bytes):
        np.random.set_state(state)
    elif type(bits) is np.random.MT19937:
        _Memory.from_address(bits.ctypes.state_address).raw = state
        _forget_normal(bits)
    else:
        np.random.set_state(("MT19937", np.frombuffer(state, np.uint32, _WORDS), _place(state), 0, 0.0))


def _forget_normal(bits: Any) -> None:
    _random.set_bit_generator(bits)


def _place(state: bytes) -> int:
    return int(np.frombuffer(state, np.int32)[_WORDS])


@cache
def _is_laid_out_so() -> bool:
    """Whether a generator's memory is what is taken for granted here."""
    bits: Any = np.random.MT19937(1)
    state = bits.state["state"]
    try:
        found = _Memory.from_address(bits.ctypes.state_address).raw
    except (AttributeError, TypeError):
        return False
    return bool((np.frombuffer(found, np.uint32, _WORDS) == state["key"]).all() and _place(found) == state["pos"])
