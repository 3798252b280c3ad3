"""Where a thread is: for finding the one rank that is somewhere else than all others."""

from __future__ import annotations

from types import FrameType
from typing import NamedTuple

from hpcaccel.runtime.distributed.collectives.call_site import site_of_frame

__all__ = ["Position", "position_of"]

LOOK_UP = 8
"""So many of the innermost calls tell whether a thread waits for others."""
_WAITING = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    "/torch/autograd/graph.py",
    "/torch/cuda/__init__.py",
    "/torch/cuda/streams.py",
    "/hpcaccel/runtime/together/rollcall.py",
    "/hpcaccel/runtime/together/exchange.py",
)
"""Where the innermost calls of a rank are that waits: in collectives, and in the backward pass."""


class Position(NamedTuple):
    fingerprint: int
    """Of all calls with the instruction that each has come to."""
    site: str
    """``file:line`` of the script."""
    waits: bool


def position_of(frame: FrameType | None) -> Position:
    """Where the thread is whose innermost frame is given."""
    calls, waits, depth = [], False, 0
    innermost = frame
    while frame is not None:
        calls.append((id(frame.f_code), frame.f_lasti))
        waits = waits or (depth < LOOK_UP and frame.f_code.co_filename.endswith(_WAITING))
        depth += 1
        frame = frame.f_back
    return Position(hash(tuple(calls)) & 0xFFFFFFFF, site_of_frame(innermost), waits)
