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


def refuse_too_many(tasks: int, backend: Backend) -> None:
    """Raises SpecError for an array that the cluster would refuse in the end."""
    most, whose = MOST, "hpcaccel makes at most"
    if isinstance(backend, SlurmBackend) and tasks > FEW:
        try:
            most, whose = largest_array(backend.slurm.config()), "this cluster takes arrays of at most"
        except HpcaccelError:
            pass  # sbatch says it in the end
    if tasks > most:
        raise SpecError(
            f"--grid: {tasks:,} combinations are as many tasks of an array, and {whose} {most:,}"
            f"{' (MaxArraySize)' if most != MOST else ''}. Use fewer values, or a sweep (hpcaccel sweep start, method: "
            "grid), whose workers take any number of trials in turn"
        )
