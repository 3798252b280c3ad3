"""Values as trackers take them: plain numbers where a tensor or an array holds only one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcaccel.runtime.rank_logger import get_logger
from hpcaccel.runtime.training.metrics_writer import plain

__all__ = ["config_leaves", "is_number", "leave_out", "plain_values", "yaml_safe"]

logger = get_logger(__name__)


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors and arrays of one element as numbers, those of a dict within too."""
    return {name: plain_values(value) if isinstance(value, Mapping) else plain(value) for name, value in values.items()}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def leave_out(tracker: str, name: str, value: Any, takes: str) -> None:
    """Say once that ``tracker`` cannot take a value."""
    logger.warning_once("%s takes %s: %r, a %s, is left out", tracker, takes, name, type(value).__name__)


def config_leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    """Each value of a configuration as a number, a truth value or a text."""
    leaves = {str(name): plain(value) for name, value in config.items()}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in leaves.items()
    }


def yaml_safe(value: Any) -> Any:
    """``value`` with lists and dicts as they are and everything else as a number, a truth value, None or a text."""
    if isinstance(value, Mapping):
        return {str(name): yaml_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [yaml_safe(item) for item in value]
    value = plain(value)
    if type(value) in (bool, int, str, type(None)):
        return value
    return float(value) if isinstance(value, float) else str(value)  # what derives from them, as enums do, is a text
