"""What has been prepared, and from which of the script's own objects: so that nothing is prepared twice."""

from __future__ import annotations

from typing import Any

from hpcaccel.errors import RuntimeMisuse

__all__ = ["Known"]


class Known:
    """Of one session. What was prepared in an earlier one is unknown, and is prepared anew."""

    def __init__(self) -> None:
        self._prepared: dict[int, Any] = {}
        self._made_of: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def note(self, raw: Any, prepared: Any, whose: Any = None) -> None:
        """``raw`` became ``prepared``; may be said of several. With ``whose``: for this Accelerator, and others may
        prepare it in its own way."""
        self._prepared[id(prepared)] = prepared
        if raw is not prepared:
            self._made_of[id(raw), id(whose)] = (raw, prepared, whose)

    def has(self, item: Any) -> bool:
        """Whether ``item`` is something that ``prepare`` gave back."""
        return id(item) in self._prepared

    def refuse_twin(self, item: Any, whose: Any = None) -> None:
        """
        Raises:
            RuntimeMisuse: ``item`` has been prepared already, and the script should use what came back then.
        """
        if (id(item), id(whose)) in self._made_of:
            kind = type(item).__name__
            raise RuntimeMisuse(
                f"this {kind} has been prepared before, and prepare() gave back another object for it: use that one, "
                "as in `model = accelerator.prepare(model)`. To prepare it anew, call accelerator.free_memory() first"
            )

    def clear(self) -> None:
        self._prepared.clear()
        self._made_of.clear()
