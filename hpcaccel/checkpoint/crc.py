"""CRC32: the same number from either library; isal reckons it several times sooner, by means of the processor."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this processor, or a container that brings torch alone
    from zlib import crc32

__all__ = ["combined_crc", "crc32"]

_POLYNOMIAL = 0xEDB88320


def combined_crc(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC32 of bytes one behind the other, from the CRC32 and the length of each part: no byte is read again."""
    whole = 0
    for crc, length in parts:
        whole = _multiply(_shift(length), whole) ^ crc
    return whole


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """x to the power of 8 · length, modulo the polynomial: what so many zero bytes do to a CRC."""
    power, result = 0x40000000, 1 << 31  # x and 1, lowest power in the highest bit
    for _ in range(3):
        power = _multiply(power, power)
    while length:
        if length & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        length >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
