"""A cost that grows with a number of ranks, runs or trials: measurements at small sizes, a law, its prediction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["COUNT_FACTOR", "LAWS", "CostTerm"]

COUNT_FACTOR = 1.2
"""Allowed ratio of predicted and counted numbers, in either direction."""

LAWS: dict[str, Callable[[float], float]] = {
    "constant": lambda size: 0.0,
    "log P": lambda size: float(math.ceil(math.log2(size))),
    "P": lambda size: size,
    "P²": lambda size: size**2,
}


@dataclass(frozen=True)
class CostTerm:
    """``value(size) = base + slope · law(size)``, fitted to the ``fitted`` smallest measured sizes.

    Args:
        unit: of the values: ``s``, ``bytes`` or a counted noun.
        law: a key of ``LAWS``.
        measured: the value by size.
        factor: the other sizes must agree with the prediction within this factor, in both directions.
        critical: whether the training waits for it.
    """

    name: str
    unit: str
    law: str
    measured: dict[int, float]
    factor: float
    critical: bool = True
    fitted: int = 2

    @property
    def coefficients(self) -> tuple[float, float]:
        """Base and slope by least squares; neither is negative."""
        points = sorted(self.measured.items())[: self.fitted]
        grown = [LAWS[self.law](size) for size, _ in points]
        values = [value for _, value in points]
        middle, mean = sum(grown) / len(grown), sum(values) / len(values)
        spread = sum((x - middle) ** 2 for x in grown)
        slope = sum((x - middle) * (y - mean) for x, y in zip(grown, values, strict=True)) / spread if spread else 0.0
        base = mean - slope * middle
        if slope < 0:
            return mean, 0.0
        if base < 0:
            return 0.0, sum(x * y for x, y in zip(grown, values, strict=True)) / sum(x * x for x in grown)
        return base, slope

    def predict(self, size: float) -> float:
        base, slope = self.coefficients
        return base + slope * LAWS[self.law](size)

    def ratios(self) -> dict[int, float]:
        """Predicted / measured for the sizes that were not fitted."""
        rest = sorted(self.measured)[self.fitted :]
        return {size: self.predict(size) / self.measured[size] for size in rest if self.measured[size]}

    @property
    def holds(self) -> bool:
        return all(1 / self.factor <= ratio <= self.factor for ratio in self.ratios().values())

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "measured": {str(size): value for size, value in self.measured.items()}}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> CostTerm:
        measured = {int(size): float(value) for size, value in fields["measured"].items()}
        return cls(**{**fields, "measured": measured})
