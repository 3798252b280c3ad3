"""Helpers for processes that a launcher has started, and for their tests: a function as the main program of a rank, its
place among the ranks, and variables that a function leaves behind."""

from __future__ import annotations

import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import rank_env
from hpcaccel.runtime.enums import DistributedType
from hpcaccel.runtime.forked_ranks import run_as_rank
from hpcaccel.runtime.states.partial_state import PartialState

__all__ = [
    "TORCH_LAUNCH_PARAMS",
    "CPUInformation",
    "PrepareForLaunch",
    "get_cpu_distributed_information",
    "purge_accelerate_environment",
    "test_launch",
]

Purged = TypeVar("Purged", bound=Callable[..., Any])

TORCH_LAUNCH_PARAMS = [
    *("nnodes", "nproc_per_node", "node_rank", "standalone", "master_addr", "master_port"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
    *("max_restarts", "monitor_interval", "start_method", "role"),
    *("m", "module", "no_python", "run_path", "log_dir", "r", "redirects", "t", "tee"),
]
"""Names of torchrun's options."""


@dataclass
class CPUInformation:
    """The place of this process: its rank and the number of ranks, in total and on its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """The place of this process among the ranks, from the variables of torchrun, srun or mpirun.

    Raises:
        RankEnvironmentError: the variables are incomplete or contradictory.
    """
    found = rank_env.detect()
    return CPUInformation(found.rank, found.world_size, found.local_rank, found.local_world_size)


class PrepareForLaunch:
    """A function as the main program of a rank: a call sets the rank's variables, and then calls the function.

    Pass it to ``torch.multiprocessing.start_processes``, which calls it with the index of each process. WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT must be set before.

    Args:
        distributed_type: a ``DistributedType``. With NO, and with types whose own launcher sets the variables, only
            FORK_LAUNCHED is set.
        debug: form a gloo group of WORLD_SIZE ranks, which find each other by the file ACCELERATE_DEBUG_RDV_FILE.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Call the function with ``args`` as rank ``index`` of this node. NPROC is the number of ranks on each node,
        and NODE_RANK the index of this node.

        Raises:
            RuntimeMisuse: ``debug`` is set, but WORLD_SIZE or ACCELERATE_DEBUG_RDV_FILE is not.
        """
        if self.debug:
            _join_by_file(index)
        elif self.distributed_type.startswith("MULTI_"):
            ranks = int(os.environ.get("NPROC", 1))
            rank = ranks * int(os.environ.get("NODE_RANK", 0)) + index
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(index))
            if "NPROC" in os.environ:
                os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
        os.environ["FORK_LAUNCHED"] = "1"
        if multiprocessing.parent_process() is None:
            self.launcher(*args)
        else:
            run_as_rank(self.launcher, args, None)


def _join_by_file(rank: int) -> None:
    size, file = os.environ.get("WORLD_SIZE", ""), os.environ.get("ACCELERATE_DEBUG_RDV_FILE")
    if not size.isdecimal() or not file:
        raise RuntimeMisuse(
            f"PrepareForLaunch(debug=True): WORLD_SIZE={size or None!r} and ACCELERATE_DEBUG_RDV_FILE={file!r} must be "
            "the number of ranks and the path of a file. debug_launcher() sets up everything by itself"
        )
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=size)
    for name, unused in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):  # torchrun sets them, too
        os.environ.setdefault(name, unused)
    store = torch.distributed.FileStore(file, int(size))
    torch.distributed.init_process_group("gloo", rank=rank, store=store, world_size=int(size))


def test_launch() -> None:
    """Create a ``PartialState``, and with it the group of the ranks. `hpcaccel test` checks much more."""
    PartialState()


test_launch.__test__ = False  # type: ignore[attr-defined]  # pytest would call it in a test module that imports it

_MARK = "_accelerate_is_purged_environment_wrapped"


def purge_accelerate_environment(func_or_cls: Purged) -> Purged:
    """Decorator that restores the ``ACCELERATE_*`` variables after each call of a function, or of a class's methods
    whose names begin with ``test``, including its subclasses. Training arguments of other libraries set such variables,
    which later tests must not read."""
    if not isinstance(func_or_cls, type):
        wrapped: Purged = _purged(func_or_cls)
        return wrapped
    kind: Any = func_or_cls
    _purge_tests(kind)
    inherited = kind.__init_subclass__

    def purge_subclass(cls: type, /, **options: Any) -> None:
        inherited.__func__(cls, **options) if inspect.ismethod(inherited) else inherited(**options)
        _purge_tests(cls)

    kind.__init_subclass__ = classmethod(purge_subclass)
    return func_or_cls


def _purge_tests(kind: type) -> None:
    for name in dir(kind):
        found = inspect.getattr_static(kind, name)
        if name.startswith("test") and inspect.isfunction(found) and not hasattr(found, _MARK):
            setattr(kind, name, _purged(found))


def _purged(function: Any) -> Any:
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _variables_restored():
                return await function(*args, **kwargs)
    else:

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _variables_restored():
                return function(*args, **kwargs)

    setattr(wrapper, _MARK, True)
    return wrapper


@contextmanager
def _variables_restored() -> Iterator[None]:
    before = _accelerates()
    try:
        yield
    finally:
        for name in _accelerates():
            del os.environ[name]
        os.environ.update(before)


def _accelerates() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
