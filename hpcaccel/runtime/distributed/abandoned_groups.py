"""Leaving groups of ranks behind in which something is still waiting.

gloo's groups wait in their destructor until everything that was begun in them has ended. A rank that dies of an
exception would so hang at its very end, until the timeout, because of a partner that waits for it in turn; and as long
as it hangs, nobody notices that it has died.
"""

from __future__ import annotations

import ctypes

import torch.distributed as dist

__all__ = ["abandon"]


def abandon() -> None:
    """Never destroy the groups that there are now: they go when the process does. Called again, it does nothing new."""
    if not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if id(group) not in _kept:
            _kept.add(id(group))
            # A reference that nobody gives back. One in a module's list would go when Python clears its modules.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


_kept: set[int] = set()
