"""Whether boxes tile a tensor: every element in exactly one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Box", "covering_problem"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a box begins, and its shape."""


def covering_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What is wrong, in words; None where the boxes tile a tensor of ``shape``."""
    for at, size in boxes:
        if len(at) != len(shape) or any(a < 0 or s < 0 or a + s > n for a, s, n in zip(at, size, shape, strict=False)):
            return f"the chunk at {list(at)} of shape {list(size)} is not inside of shape {list(shape)}"
    covered, whole = sum(math.prod(size) for _, size in boxes), math.prod(shape)
    if covered < whole:
        return f"{whole - covered} of its {whole} elements are in no chunk"
    if (twins := _overlapping(boxes)) is not None:
        return f"the chunks at {list(twins[0][0])} and {list(twins[1][0])} overlap"
    return None


def _overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """A sweep along the first dimension: only boxes that lie beside each other there are compared."""
    solid = [box for box in boxes if math.prod(box[1])]
    if not solid or not solid[0][0]:
        return (solid[0], solid[1]) if len(solid) > 1 else None
    beside: list[Box] = []
    for box in sorted(solid):
        beside = [other for other in beside if other[0][0] + other[1][0] > box[0][0]]
        for other in beside:
            if all(a < b + m and b < a + n for a, n, b, m in zip(box[0], box[1], other[0], other[1], strict=True)):
                return other, box
        beside.append(box)
    return None
