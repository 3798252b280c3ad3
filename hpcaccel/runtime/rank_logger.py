"""Logging and progress bars by rank: ``get_logger``, ``tqdm``, and the training's log.

Loggers from ``get_logger`` work from the first line of a script: before the process group exists, the rank comes from
the launcher's variables. (Accelerate's logger raises until its state exists.)

The training logs resumes, checkpoints and stops to ``logging.getLogger("hpcaccel.training")``. By default rank 0 prints
each line as ``hpcaccel: <message>`` to standard output, and every rank prints its errors to standard error. Handlers
that a program attaches to the logger ``hpcaccel`` or ``hpcaccel.training`` before ``Accelerator()`` replace the output.
Records have the attribute ``rank``. ``HPCACCEL_LOG_LEVEL`` or the program sets the level, which is INFO by default.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcaccel.core.log import LEVEL
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import rank_env

__all__ = [
    "TRAINING_LOG",
    "MultiProcessAdapter",
    "RankHandler",
    "configure_training_log",
    "get_logger",
    "this_rank",
    "torch_distributed",
    "tqdm",
]

TRAINING_LOG = "hpcaccel.training"
"""Name of the training's logger."""

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:
    Adapter = logging.LoggerAdapter

_LEVEL_VARIABLES = (LEVEL, "ACCELERATE_LOG_LEVEL")

_logged_once: set[tuple[str, str]] = set()


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """The logger ``name``, which logs on rank 0 only unless a call passes ``main_process_only=False`` or
    ``in_order=True``.

    Args:
        log_level: level to set for this logger and for the root logger, as in Accelerate. By default, the value of the
            variable ``HPCACCEL_LOG_LEVEL`` or ``ACCELERATE_LOG_LEVEL``; if neither is set, the levels are unchanged.

    Raises:
        RuntimeMisuse: the level is unknown.
    """
    logger = logging.getLogger(name)
    level = log_level or next((os.environ[key] for key in _LEVEL_VARIABLES if os.environ.get(key)), None)
    if level is not None:
        number = _level(level)
        logger.setLevel(number)
        logging.getLogger().setLevel(number)
    return MultiProcessAdapter(logger, {})


class MultiProcessAdapter(Adapter):
    """A logger whose methods take two more keywords, with defaults: ``main_process_only=True``, ``in_order=False``.

    Lines that several ranks may log begin with the rank, such as ``[rank 3]``. With ``in_order=True`` all ranks must
    make the call, including ranks whose level hides the message. They log one after the other and return together, at
    the cost of a barrier per rank. Before ``Accelerator()`` or ``PartialState()`` has created the process group, ranks
    do not wait for each other.
    """

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return msg, kwargs  # the base class would replace the caller's ``extra``

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        enabled = self.isEnabledFor(level)
        if not (enabled or in_order):
            return
        rank = this_rank()
        msg, kwargs = self.process(msg, kwargs)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # report the caller's line
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
        """Like ``warning``, but log the same message with the same arguments only once per process."""
        key = (self.logger.name, repr((msg, args)))
        if key not in _logged_once:
            _logged_once.add(key)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.log(logging.WARNING, msg, *args, **kwargs)


def this_rank() -> int:
    """The rank of this process in its process group; without a group, the rank in the launcher's variables.

    Raises:
        RankEnvironmentError: the variables contradict each other.
    """
    group = _group()
    if group is not None:
        return int(group.rank)
    dist = torch_distributed()
    return int(dist.get_rank()) if dist is not None else rank_env.detect().rank


def _turns() -> tuple[int, Callable[[], Any]]:
    """Returns the number of ranks that log in turn, and the function with which they wait for each other."""
    group = _group()
    if group is not None:
        return group.world_size, group.barrier
    dist = torch_distributed()
    return (dist.get_world_size(), dist.barrier) if dist is not None else (1, lambda: None)


def _group() -> Any | None:
    """hpcaccel's process group; None if there is none. Does not import ``world``, because a logger must not import
    torch."""
    module = sys.modules.get("hpcaccel.runtime.distributed.world")
    world = module.World.existing() if module is not None else None
    return None if world is None else world.group


def torch_distributed() -> Any | None:
    """The module ``torch.distributed`` if the script has created a process group itself, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _level(level: str | int) -> int:
    if isinstance(level, str):
        level = level.strip().upper()
        number = int(level) if level.isdecimal() else logging.getLevelName(level)
    else:
        number = level
    if not isinstance(number, int):
        raise RuntimeMisuse(f"unknown log level {level!r}: use DEBUG, INFO, WARNING, ERROR, CRITICAL or an integer")
    return number


class RankHandler(logging.Handler):
    """Writes each message as ``hpcaccel: <message>``: errors to standard error, others to standard output."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("hpcaccel: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
            print(self.format(record), file=stream, flush=True)
        except Exception:
            self.handleError(record)


class _RankFilter(logging.Filter):
    """Sets the attribute ``rank`` of records, and drops records below ERROR on ranks other than 0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        return self.rank == 0 or record.levelno >= logging.ERROR


def configure_training_log(rank: int) -> None:
    """Set up the training's log in this process, as the module's docstring describes. Called by each session."""
    package, logger = logging.getLogger("hpcaccel"), logging.getLogger(TRAINING_LOG)
    for earlier in [one for one in logger.filters if isinstance(one, _RankFilter)]:
        logger.removeFilter(earlier)
    logger.addFilter(_RankFilter(rank))
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
    if not (logger.handlers or package.handlers):
        logger.addHandler(RankHandler())
        logger.propagate = False
    if os.environ.get(LEVEL):
        try:
            logger.setLevel(_level(os.environ[LEVEL]))
        except RuntimeMisuse as error:
            logger.warning("%s is ignored: %s", LEVEL, error)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A progress bar, ``tqdm.auto.tqdm``, that is enabled only on the first process of each node.

    Args:
        main_process_only: if False, the bar is enabled on all ranks.

    Raises:
        ImportError: tqdm is not installed.
        RuntimeMisuse: the first argument is a bool.
    """
    if args and isinstance(args[0], bool):
        raise RuntimeMisuse(f"tqdm({args[0]}, ...): pass main_process_only={args[0]} as a keyword argument")
    try:
        from tqdm.auto import tqdm as bar
    except ModuleNotFoundError as error:
        raise ImportError("tqdm() needs the package tqdm, which is not installed: pip install tqdm") from error
    group = _group()
    place = rank_env.detect() if group is None else group.env
    disable = kwargs.pop("disable", False) or (main_process_only and place.local_rank != 0)
    return bar(*args, disable=disable, **kwargs)
