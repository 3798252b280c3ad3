"""Which runs have warm parents (``resilience.warm_restart: auto``)."""

from __future__ import annotations

import resource
import sys

from hpcaccel.core.launch_spec import LaunchSpec

__all__ = ["OFF", "why_not_warm"]

OFF = "resilience.warm_restart: off"
SPARE_FILES = 100
"""Number of open files that the supervisor needs besides a connection to each warm parent."""


def why_not_warm(launch: LaunchSpec) -> str:
    """The part of the spec for which this run's ranks have no warm parents; empty if they have."""
    if launch.resilience.warm_restart == "off":
        return OFF
    for reason, found in {
        "launcher: torchrun": launch.launcher == "torchrun",
        "container": launch.container is not None,
        "components": bool(launch.components),
        "runtime.bridge": launch.bridge is not None,
        "srun.extra: --mpi": any(word.startswith("--mpi") for word in launch.srun) and "--mpi=none" not in launch.srun,
        f"{launch.ranks} ranks and at most {_most_files()} open files (ulimit -n)": launch.ranks + SPARE_FILES
        > _most_files(),
    }.items():
        if found:
            return reason
    if launch.callable:
        return ""
    words = [*launch.program, "", ""]
    if words[0] == "{python}" and (words[1] in ("-m", "-c") or words[1].endswith(".py")):
        return ""
    return "entrypoint.command"


def _most_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
