"""Checks of the sizes of the mesh (``--parallelism-config-*-size``) before any rank starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpcaccel.errors import UserError
from hpcaccel.launch.flags import spelled

__all__ = ["SIZES", "check_divides", "check_sizes"]

SIZES = tuple(f"parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "cp", "sp", "tp"))
"""Options with the size of a dimension."""


def check_sizes(options: Mapping[str, Any], *, from_file: frozenset[str] = frozenset()) -> None:
    """Raise UserError if a size is below 1.

    Args:
        from_file: names of the options that the configuration file gives.
    """
    for name in SIZES:
        if options.get(name) is not None and options[name] < 1:
            raise UserError(f"{_written(name, options, from_file)} must be at least 1")


def check_divides(options: Mapping[str, Any], ranks: int | None, *, given: Mapping[str, Any]) -> None:
    """Raise UserError if the product of the sizes does not divide the number of ranks.

    Sizes that are not set follow from the number of ranks, or are 1: see ``arrange`` of ``mesh_layout``.

    Args:
        ranks: the number of ranks; None if it is not known.
        given: flags of the command line; other options are from the configuration file.
    """
    if ranks is None or options.get("use_parallelism_config") is False:
        return
    sizes = {name: options[name] for name in SIZES if options.get(name) not in (None, 1)}
    product = math.prod(sizes.values())
    if ranks % product == 0:
        return
    from_file = frozenset(options) - frozenset(given)
    shown = " and ".join(_written(name, options, from_file) for name in sizes)
    what = shown if len(sizes) == 1 else f"{product}, the product of {shown}"
    raise UserError(
        f"the number of ranks, {ranks}, must be a multiple of {what}. Change the size{'s' * (len(sizes) > 1)}, or the "
        "number of ranks (--num-processes, --nproc-per-node)"
    )


def _written(name: str, options: Mapping[str, Any], from_file: frozenset[str]) -> str:
    """A size as the user has written it, for messages."""
    if name in from_file:
        return f"{name}: {options[name]} (in the configuration file)"
    return f"{spelled(name)} {options[name]}"
