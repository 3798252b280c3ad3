"""Which cluster a command speaks of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcaccel.spec import ClusterProfile

__all__ = ["chosen_profile"]


def chosen_profile(name: str | None) -> ClusterProfile | None:
    """The profile ``name``, the default one without a name; None: Slurm as it is, without any profile."""
    from hpcaccel.spec import load_profile, profile_names

    if name == "slurm" and name not in profile_names():
        return None
    return load_profile(name)
