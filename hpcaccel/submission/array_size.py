"""How many tasks an array may have, asked before thousands of them are made."""

from __future__ import annotations

from collections.abc import Mapping

from hpcaccel.errors import HpcaccelError, SpecError
from hpcaccel.submission.backend import Backend, SlurmBackend

__all__ = ["largest_array", "refuse_too_many"]

DEFAULT_SIZE = 1001
"""Slurm's default of MaxArraySize."""
FEW = 100
"""So many any site takes: nobody is asked."""
MOST = 100_000
"""More combinations than this are a mistake on the local backend, too."""


def largest_array(config: Mapping[str, str]) -> int:
    """How many tasks an array may have; ``config`` is ``Slurm.config()``."""
    size = config.get("MaxArraySize", "")
    return max(1, int(size) if size.isdigit() else DEFAULT_SIZE)


def refuse_too_many(tasks: int, backend: Backend, *, of_map: bool) -> None:
    """Raises SpecError for an array that the cluster would refuse in the end.

    Args:
        of_map: its tasks are the items of ``hpcaccel.map``.
    """
    limit = f"hpcaccel makes arrays of at most {MOST:,}"
    most = MOST
    if isinstance(backend, SlurmBackend) and tasks > FEW:
        try:
            most = largest_array(backend.slurm.config())
            limit = f"this cluster's arrays have at most {most:,} (MaxArraySize)"
        except HpcaccelError:
            pass  # sbatch says it in the end
    if tasks > most and of_map:
        raise SpecError(
            f"hpcaccel.map() makes {tasks:,} tasks, one for each item; {limit}. Let the function take several items at "
            "a time"
        )
    if tasks > most:
        raise SpecError(
            f"--grid makes {tasks:,} tasks; {limit}. Use fewer values, or a sweep (hpcaccel sweep start, method: "
            "grid), whose workers take any number of trials in turn"
        )
