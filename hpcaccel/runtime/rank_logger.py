"""Loggers that know their rank: one line for all ranks, or one of each, in order.

Accelerate's logger raises before its state exists. This one works from the first line of a script: until the ranks
have met, the launcher's variables tell which rank this is.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import rank_env

__all__ = ["MultiProcessAdapter", "get_logger", "this_rank"]

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:
    Adapter = logging.LoggerAdapter

_LEVEL_VARIABLES = ("HPCACCEL_LOG_LEVEL", "ACCELERATE_LOG_LEVEL")

_said: set[tuple[str, str]] = set()


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """The logger ``name``, speaking on rank 0 only unless a call says otherwise.

    Args:
        log_level: of this logger and of the root logger, as Accelerate sets it; default: the variable
            ``HPCACCEL_LOG_LEVEL`` or ``ACCELERATE_LOG_LEVEL``, else levels stay as they are.

    Raises:
        RuntimeMisuse: a level that logging does not know.
    """
    logger = logging.getLogger(name)
    level = log_level or next((os.environ[key] for key in _LEVEL_VARIABLES if os.environ.get(key)), None)
    if level is not None:
        number = _level(level)
        logger.setLevel(number)
        logging.getLogger().setLevel(number)
    return MultiProcessAdapter(logger, {})


class MultiProcessAdapter(Adapter):
    """A logger's methods with two words more: ``main_process_only`` (True) and ``in_order`` (False).

    What several ranks may say begins with ``[rank 3]``. With ``in_order=True`` all ranks must call, also those whose
    level hides the message: they speak one after the other and leave together, which costs a barrier a rank. Before
    the ranks have met (``Accelerator()``, ``PartialState()``) they cannot wait for each other, and speak at once.
    """

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return msg, kwargs  # the standard one would replace the caller's ``extra``

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        enabled = self.isEnabledFor(level)
        if not (enabled or in_order):
            return
        rank = this_rank()
        msg, kwargs = self.process(msg, kwargs)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's line, not this one
        if in_order or not main_process_only:
            msg = f"[rank {rank}] {msg}"
        if not in_order:
            if rank == 0 or not main_process_only:
                self.logger.log(level, msg, *args, **kwargs)
            return
        turns, wait = _turns()
        for turn in range(turns):
            if enabled and turn == rank % turns:
                self.logger.log(level, msg, *args, **kwargs)
            wait()

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """``warning``, the same words only once in this process."""
        key = (self.logger.name, repr((msg, args)))
        if key not in _said:
            _said.add(key)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.log(logging.WARNING, msg, *args, **kwargs)


def this_rank() -> int:
    """The rank of this process, as far as it is known: of the group that it has joined, else by the launcher's
    variables.

    Raises:
        RankEnvironmentError: the variables contradict each other.
    """
    group = _group()
    if group is not None:
        return int(group.rank)
    dist = _torch_distributed()
    return int(dist.get_rank()) if dist is not None else rank_env.detect().rank


def _turns() -> tuple[int, Callable[[], Any]]:
    """How many ranks speak in turn, and how each waits for the one that does."""
    group = _group()
    if group is not None:
        return group.world_size, group.barrier
    dist = _torch_distributed()
    return (dist.get_world_size(), dist.barrier) if dist is not None else (1, lambda: None)


def _group() -> Any | None:
    """The ranks that this process has met. A logger brings neither torch nor the group along: it looks for them."""
    module = sys.modules.get("hpcaccel.runtime.distributed.world")
    world = module.World.existing() if module is not None else None
    return None if world is None else world.group


def _torch_distributed() -> Any | None:
    """torch.distributed where a script has formed a group by itself."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _level(level: str | int) -> int:
    number = level if isinstance(level, int) else logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise RuntimeMisuse(
            f"log level {level!r} is not known. Known are: DEBUG, INFO, WARNING, ERROR, CRITICAL, and numbers"
        )
    return number
