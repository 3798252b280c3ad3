"""Names that scripts import whatever they then use: classes of DeepSpeed's that stand for an optimizer and a scheduler
which its own configuration file describes."""

from __future__ import annotations

from typing import Any

from hpcaccel.errors import RuntimeMisuse

__all__ = ["DummyOptim", "DummyScheduler"]


class _OfDeepSpeed:
    """
    Raises:
        RuntimeMisuse: whenever one is made.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeMisuse(
            f"{type(self).__name__}(): DeepSpeed, whose configuration file would say what this is, is not here. "
            "Make an optimizer and a scheduler of torch's; Accelerator(strategy='fsdp') shards their state, too"
        )


class DummyOptim(_OfDeepSpeed):
    """An optimizer that DeepSpeed's configuration file describes: ``isinstance`` says no, making one is an error."""


class DummyScheduler(_OfDeepSpeed):
    """A scheduler that DeepSpeed's configuration file describes: ``isinstance`` says no, making one is an error."""
