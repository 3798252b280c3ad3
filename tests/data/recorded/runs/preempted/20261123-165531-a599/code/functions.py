"""What a recorded run calls."""

from __future__ import annotations


def double(value: int) -> int:
    return 2 * value
