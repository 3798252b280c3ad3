"""A progress bar that only one process of a node shows."""

from __future__ import annotations

from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import rank_env
from hpcaccel.runtime.distributed.world import World

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """``tqdm.auto.tqdm``, disabled but on the first process of each node.

    Raises:
        ImportError: tqdm is not installed.
        RuntimeMisuse: a bool where the iterable belongs.
    """
    if args and isinstance(args[0], bool):
        raise RuntimeMisuse(f"tqdm({args[0]}, ...): say main_process_only={args[0]}, as a keyword")
    try:
        from tqdm.auto import tqdm as bar
    except ModuleNotFoundError as error:
        raise ImportError("hpcaccel's tqdm shows tqdm's bar, which is not installed: pip install tqdm") from error
    world = World.existing()
    place = rank_env.detect() if world is None else world.env
    disable = kwargs.pop("disable", False) or (main_process_only and place.local_rank != 0)
    return bar(*args, disable=disable, **kwargs)
