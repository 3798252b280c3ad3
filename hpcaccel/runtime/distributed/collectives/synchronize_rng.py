"""``synchronize_rng_states``: random generators brought to the state of rank 0's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.generators import check_rng_types, synchronise
from hpcaccel.runtime.distributed.world import World

__all__ = ["synchronize_rng_state", "synchronize_rng_states"]


def synchronize_rng_states(rng_types: Sequence[Any], generator: torch.Generator | None = None) -> None:
    """Set each kind of generator (``torch``, ``cuda``, ``numpy``, ``python``, ``generator``) to rank 0's state.

    Args:
        generator: what ``"generator"`` stands for.

    Raises:
        RuntimeMisuse: an unknown kind; ``"generator"`` without one; some ranks do not come.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator=generator)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """``synchronize_rng_states`` for one kind."""
    (name,) = check_rng_types([rng_type])
    group = World.current().group
    group.refuse_if_left()
    if name != "generator":
        synchronise([name], group)
    elif generator is None:
        raise RuntimeMisuse('synchronize_rng_states(["generator"]) needs the generator: give generator=...')
    else:
        generator.set_state(group.from_main(generator.get_state(), "synchronize_rng_states"))
