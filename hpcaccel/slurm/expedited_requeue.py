"""Slurm's expedited requeue, ``sbatch --requeue=expedite``: where it is to be had, and what there is elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["ENABLED_BY", "why_not_expedited"]

FIRST_RELEASE = (25, 11)
ENABLED_BY = "enable_expedited_requeue"


def why_not_expedited(config: Mapping[str, str]) -> str:
    """Why a cluster with these settings (``scontrol show config``) refuses it; empty where it does not."""
    version = config.get("SLURM_VERSION", "")
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < FIRST_RELEASE:
        return f"Slurm has it from 25.11 on, and this cluster runs {version or 'a release that it does not name'}"
    if ENABLED_BY not in config.get("SlurmctldParameters", ""):
        return f"SlurmctldParameters of this cluster's slurm.conf does not have {ENABLED_BY}"
    return ""
