"""The section ``resilience`` of a job spec, and its conflicts with other sections."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from hpcaccel.spec.job.fields import Conflict, Count, Natural, Positive, Requeue, Section, part_of

__all__ = ["ResilienceSection", "node_loss_conflicts"]


class ResilienceSection(Section):
    """What happens after preemptions, at the time limit and after failures."""

    requeue: Requeue = Field(
        default=True,
        description="Requeue the job after a preemption or at the time limit. expedite: without delay, and after the "
        "loss of a node ahead of all other jobs, through Slurm's --requeue=expedite (25.11 and later, with "
        "enable_expedited_requeue in SlurmctldParameters). The batch job then always ends with exit code 0.",
    )
    warning_seconds: Count = Field(
        default=120,
        description="How many seconds before the time limit the ranks are requested to save and exit; more if the "
        "slowest save and two steps, as measured, take longer. Slurm can send its signal up to 60 s earlier. At most "
        "half of the time limit.",
    )
    max_failures: Natural = Field(
        default=3,
        description="Failures after which the run ends. Two failures without a new checkpoint between them also end "
        "it.",
    )
    max_preemptions: Natural | None = Field(
        default=None, description="Preemptions that a run survives: the next one ends it. null: no limit."
    )
    restart_in_place: Natural = Field(
        default=2, description="How often the ranks are restarted in the same allocation after a failure."
    )
    on_node_loss: Literal["requeue", "shrink"] = Field(
        default="requeue",
        description="What happens when a node of a running job fails and no spare node is left. shrink: the ranks are "
        "restarted in the same job on fewer nodes, if slurm.nodes is a range or a list that allows this; until then "
        "they use as many of the job's nodes as it allows. A requeue, as by `hpcaccel stop --requeue`, brings the full "
        "number back. The job is submitted with sbatch's --no-kill.",
    )
    spare_nodes: Natural = Field(
        default=0,
        description="Number of nodes that the job gets in addition to slurm.nodes. They are idle until a node fails: "
        "then the ranks are restarted in the same job, with a spare node in place of the failed one, and the job does "
        "not go back to the queue. It is submitted with sbatch's --no-kill. Counts as a restart in place.",
        examples=[1],
    )
    warm_restart: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: each rank has a parent process that outlives it, imports the rank's modules while the first "
        "attempt trains, and starts the next attempt in the same place by fork, without srun and without imports. "
        "Commands, torchrun, containers, components, bridges and MPI have no such parents: their restarts begin with "
        "new processes, and so does each restart for which a fork would not be safe. off: all restarts do.",
    )
    preflight: Literal["off", "quick", "full"] = Field(
        default="quick",
        description="Checks on each node before the ranks start; a node that fails is excluded. quick: GPUs, disk, "
        "name resolution. full: also a small all-reduce between all ranks.",
    )
    exclude_hours: Positive = Field(
        default=24, description="How many hours a node is excluded after a failure that it caused."
    )
    max_excluded: Natural = Field(default=4, description="Maximum number of nodes excluded at a time; 0: none.")
    stop_timeout_seconds: Count = Field(
        default=300,
        description="How long ranks may take to save and exit after a stop request before they are killed; longer if "
        "their saves are known to take longer.",
    )
    hang_timeout_seconds: Natural | None = Field(
        default=None,
        description="If no rank completes a step, reads a batch or completes a collective call for this long, the "
        "ranks are considered hung: their stacks are recorded, and they are killed and restarted. The limit is three "
        "times as long for the first step, for loads and saves, and for a single rank. Default: twenty times the "
        "typical step time, at least 600; 0: hangs are not detected.",
    )
    chain: Count | None = Field(
        default=None,
        description="Continue in follow-up jobs instead of requeueing, for sites that forbid requeueing or cancel "
        "preempted jobs (PreemptMode=CANCEL). The value is the maximum number of jobs in a row. After the last one, "
        "the run continues only when it is resumed.",
        examples=[10],
    )
    chain_ahead: Count = Field(
        default=2,
        description="How many follow-up jobs wait in the queue. Each job submits another one when it starts. If sbatch "
        "is forbidden on compute nodes, set this to chain - 1: submit then submits all of them.",
    )

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        if values.get("chain") is not None and values.get("requeue") is False:
            found.append(Conflict("chain", "conflicts with requeue: false: set only one of them"))
        if values.get("chain") is not None and values.get("requeue") == "expedite":
            found.append(Conflict("chain", "conflicts with requeue: expedite: set only one of them"))
        if values.get("requeue") is False or values.get("chain") is not None:
            for key in _node_loss_keys(values):
                advice = (
                    "needs resilience.requeue, and no chain: if the job's first node fails, it has to be requeued. "
                    f"Remove {key}"
                )
                found.append(Conflict(key, advice))
        return found

    @property
    def outlives_nodes(self) -> bool:
        """Whether the job is submitted with --no-kill, so that it continues without a node that fails."""
        return self.spare_nodes > 0 or self.on_node_loss == "shrink"


def _node_loss_keys(resilience: Mapping[str, Any]) -> list[str]:
    """The keys by which the job continues without a node that fails, if they are set to more than their defaults."""
    return [key for key in ("spare_nodes", "on_node_loss") if resilience.get(key) not in (None, 0, "requeue")]


def node_loss_conflicts(values: Mapping[str, Any]) -> list[Conflict]:
    """Conflicts of ``spare_nodes`` and ``on_node_loss`` with other sections of a job spec, which may not be validated
    yet."""
    wanted = _node_loss_keys(part_of(values, "resilience"))
    found = []
    if part_of(values, "components"):
        advice = "cannot be combined with components: Slurm ends a heterogeneous job as a whole. Remove one of them"
        found += [Conflict(f"resilience.{key}", advice) for key in wanted]
    if values.get("sweep") is not None:
        advice = "cannot be combined with sweep: after the loss of a node its worker is requeued. Remove it"
        found += [Conflict(f"resilience.{key}", advice) for key in wanted]
    if "on_node_loss" in wanted and not set(str(part_of(values, "slurm").get("nodes", "1"))) & set("-,"):
        advice = "shrink needs several sizes in slurm.nodes: write a range such as 3-4, or a list of sizes"
        found.append(Conflict("resilience.on_node_loss", advice))
    if "on_node_loss" in wanted and part_of(values, "entrypoint").get("function") is not None:
        advice = "shrink supports only programs: the results of a function belong to a fixed number of ranks"
        found.append(Conflict("resilience.on_node_loss", advice))
    return found
