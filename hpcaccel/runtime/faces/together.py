"""What all ranks do together."""

from __future__ import annotations

from typing import Any

from hpcaccel.runtime import ops
from hpcaccel.runtime.session import Session

__all__ = ["TogetherFace"]


class TogetherFace:
    _session: Session

    def gather(self, value: Any) -> Any:
        """All ranks' tensors, concatenated along dimension 0, on every rank."""
        return ops.gather(value, self._session.group)

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The ``sum`` or ``mean`` of all ranks' tensors, on every rank."""
        return ops.reduce(value, self._session.group, reduction=reduction, scale=scale)
