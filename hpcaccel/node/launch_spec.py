"""What the batch step reads from ``spec.json``: how to start the ranks, and how to treat their ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpcaccel.core.run_dir import RunDir, read_json
from hpcaccel.errors import RunDirectoryError
from hpcaccel.node.environment.container_command import Container, read_container
from hpcaccel.node.environment.stage_path import Stage, read_stage

__all__ = ["Component", "Launch", "Resilience", "read_launch"]


@dataclass(frozen=True, kw_only=True)
class Resilience:
    """The ``resilience`` section; see its description in the spec."""

    requeue: bool | str
    """Whether the job may come back through the queue; ``expedite``: as Slurm's --requeue=expedite has it."""
    warning_seconds: int
    stop_timeout_seconds: int
    max_failures: int
    max_preemptions: int | None
    restart_in_place: int
    preflight: str = "off"
    exclude_hours: float = 24.0
    max_excluded: int = 0
    hang_timeout_seconds: int | None = None
    chain: int | None = None
    chain_ahead: int = 2


@dataclass(frozen=True, kw_only=True)
class Component:
    """A program beside the ranks; see ``components`` in the spec."""

    name: str
    program: list[str]
    nodes: int
    processes_per_node: int
    srun: list[str]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the ranks are started."""

    callable: bool
    program: list[str]
    python: str | None
    pythonpath: list[str]
    workdir: str
    local: bool
    nodes: int
    ranks_per_node: int
    cooperative: bool
    srun: list[str]
    share_gpus: bool
    """Slurm was asked for GPUs by the rank; each rank is to see those of its node all the same."""
    setup_per_node: list[str]
    time_limit_seconds: int | None
    resilience: Resilience
    beside: bool = False
    """Steps of others run in the same allocation: a short step must not wait for what they hold."""
    loader_shield: str | None = None
    """A folder for the ranks' PYTHONPATH that keeps data-loader workers alive through a SIGTERM to all processes."""
    launcher: str = "srun"
    """``srun``, or ``torchrun``: one a node, which starts the node's ranks."""
    container: Container | None = None
    stage: Stage | None = None
    components: list[Component] = field(default_factory=list)
    after: list[dict[str, str]] = field(default_factory=list)
    """Runs that come before: ``kind`` (afterok, …) and ``run``, a directory."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def read_launch(run: RunDir) -> Launch:
    """Read ``spec.json``.

    Raises:
        RunDirectoryError: it is missing or was written by an incompatible version.
    """
    document = read_json(run.spec)
    if document is None:
        raise RunDirectoryError(f"{run.spec} is missing: {run.path} is not a run directory that was submitted")
    try:
        launch: dict[str, Any] = document["launch"]
        resilience: dict[str, Any] = document["spec"]["resilience"]
        return Launch(
            callable=launch["kind"] == "callable",
            program=launch["program"],
            python=launch["python"],
            pythonpath=launch["pythonpath"],
            workdir=launch["workdir"],
            local=launch["backend"] == "local",
            nodes=launch["nodes"],
            ranks_per_node=launch["ranks_per_node"],
            cooperative=launch["stop"] == "cooperative",
            srun=launch["srun"],
            share_gpus=launch.get("share_gpus", False),
            setup_per_node=launch["setup_per_node"],
            time_limit_seconds=launch.get("time_limit_seconds"),
            loader_shield=launch.get("loader_shield"),
            launcher=launch.get("launcher", "srun"),
            container=read_container(launch.get("container")),
            stage=read_stage(launch.get("stage")),
            components=[Component(**one) for one in launch.get("components", [])],
            after=launch.get("after", []),
            resilience=Resilience(
                requeue=resilience["requeue"],
                warning_seconds=launch.get("warning_seconds", resilience["warning_seconds"]),
                stop_timeout_seconds=resilience["stop_timeout_seconds"],
                max_failures=resilience["max_failures"],
                max_preemptions=resilience["max_preemptions"],
                restart_in_place=resilience["restart_in_place"],
                preflight=resilience.get("preflight", "off"),
                exclude_hours=resilience.get("exclude_hours", 24.0),
                max_excluded=resilience.get("max_excluded", 0),
                hang_timeout_seconds=resilience.get("hang_timeout_seconds"),
                chain=resilience.get("chain"),
                chain_ahead=resilience.get("chain_ahead", 2),
            ),
        )
    except (KeyError, TypeError) as error:
        raise RunDirectoryError(f"{run.spec} was written by another version of hpcaccel ({error!r})") from None
