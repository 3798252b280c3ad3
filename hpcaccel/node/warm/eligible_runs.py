"""Which runs have warm parents (``resilience.warm_restart: auto``), and whether a trial takes over those of another."""

from __future__ import annotations

import dataclasses

from hpcaccel.core.launch_spec import LaunchSpec, RestartPolicy
from hpcaccel.core.open_files import most_open_files
from hpcaccel.node.warm.warm_ranks import WarmStep

__all__ = ["OFF", "KeptStep", "files_of", "why_not_warm"]

OFF = "resilience.warm_restart: off"
SPARE_FILES = 100
"""Number of open files that the supervisor needs besides a connection to each warm parent."""


def why_not_warm(launch: LaunchSpec) -> str:
    """The setting or limit because of which this run's ranks have no warm parents; empty if they have them."""
    if launch.resilience.warm_restart == "off":
        return OFF
    for reason, found in {
        "launcher: torchrun": launch.launcher == "torchrun",
        "container": launch.container is not None,
        "components": bool(launch.components),
        "runtime.bridge": launch.bridge is not None,
        "srun.extra: --mpi": any(word.startswith("--mpi") for word in launch.srun) and "--mpi=none" not in launch.srun,
        f"{launch.ranks} ranks and at most {most_open_files()} open files (ulimit -Hn)": files_of(launch)
        > most_open_files(),
    }.items():
        if found:
            return reason
    if launch.callable:
        return ""
    words = [*launch.program, "", ""]
    if words[0] == "{python}" and (words[1] in ("-m", "-c") or words[1].endswith(".py")):
        return ""
    return "entrypoint.command"


def files_of(launch: LaunchSpec) -> int:
    """Number of files that a supervisor with warm parents has open."""
    return launch.ranks + SPARE_FILES


class KeptStep:
    """The warm parents that a trial has left for the next trial in the same slot, if it has left any."""

    def __init__(self) -> None:
        self.step: WarmStep | None = None
        self._launch: LaunchSpec | None = None

    def take(self, launch: LaunchSpec) -> WarmStep | None:
        """The parents, if they can start the ranks of ``launch``; otherwise they are ended."""
        if self._launch is None or _without_words(launch) != _without_words(self._launch):
            self.end()
        step, self.step = self.step, None
        return step

    def put(self, step: WarmStep | None, launch: LaunchSpec) -> None:
        self.step, self._launch = step, launch

    def end(self) -> None:
        if self.step is not None:
            self.step.end()
            self.step = None


def _without_words(launch: LaunchSpec) -> LaunchSpec:
    """``launch`` without what is passed with each start of ranks or concerns the supervisor alone."""
    return dataclasses.replace(
        launch, program=launch.program[:2], resume_args=[], after=[], watch=None, resilience=RestartPolicy()
    )
