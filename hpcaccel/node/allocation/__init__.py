"""The allocation: the nodes of a job, and the batch step's interface to the scheduler.

``Allocation`` is the protocol. ``LocalAllocation`` is this machine; ``slurm_allocation`` and ``chain`` implement Slurm
jobs.

``Slot`` is one trial's share when several trials run side by side. On Slurm each trial is a step with its own
CPUs, memory and GPUs (``--exact``), so that Slurm itself isolates them. If the number of a node's GPUs is not
divisible by the number of trials, the steps overlap, and each trial uses its own part of the GPUs or shares one. On the
local backend each trial gets its part of ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpcaccel.core.launch_spec import LaunchSpec
from hpcaccel.core.process_identity import started_at
from hpcaccel.core.records import Reason
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node import batch
from hpcaccel.slurm.states import JobState

__all__ = [
    "OVERLAP",
    "SHORT_STEP",
    "SLOT",
    "TAKEN_DOWN",
    "Allocation",
    "JobStatus",
    "LocalAllocation",
    "Slot",
    "gpus_of",
]

TAKEN_DOWN = "the job is being terminated"

SHORT_STEP = "--overlap"
"""srun option for steps that prepare and check the nodes: they share the job's CPUs, memory and GPUs with all steps.
Without this option, Slurm may still hold the memory of such a step after its srun has ended, and refuse the ranks' step
(22.05: "Memory required by task is not available"). The step would also wait for other trials in the same job."""

OVERLAP = (SHORT_STEP, "--mem=0")
"""srun options for a step of ranks in a job that has lost a node. Slurm keeps CPUs, GPUs and memory of a step that had
a part on the lost node, even after the step has ended (22.05; 23.02.3 mends it, says its changelog). With these options
the next step does not wait for them; it may use all of the job's memory on each node."""


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The job's status at one moment. Times are seconds since the epoch."""

    running: bool
    """False once the scheduler terminates the job, for instance after scancel or in a preemption without grace time."""
    preempted: bool = False
    """Whether the job was chosen for preemption. While it is still ``running``, it is in its grace time."""
    will_requeue: bool = False
    """Whether the job is being terminated and the scheduler will restart it or start the next job of its chain."""
    termination_reason: Reason | None = None
    """``preempted``, ``time_limit`` or ``lost`` (node failure); for a sweep's trial also ``cancelled``. None while the
    job runs, after a user's cancel, or if Slurm itself requeues the job."""
    requeueable: bool = False
    """Whether the scheduler terminates the job by its own decision and ``scontrol requeue`` may still succeed."""
    failed_nodes: tuple[str, ...] = ()
    """Nodes of the job whose failure caused the termination."""
    submit_time: float | None = None
    start_time: float | None = None
    """When the job got its nodes for the current start."""
    end_time: float | None = None
    known: bool = True
    """False if the scheduler did not respond."""


class Allocation(Protocol):
    job_id: str
    jobs: Sequence[str]
    """IDs of this job and of the other jobs of its chain. The run's caps apply to all of them together."""
    restart_count: int
    nodes: list[str]
    """The nodes of the job that it has not lost, as of the last query."""
    chained: bool
    """Whether the run continues in the next job of a chain instead of being requeued."""
    status_is_free: bool
    """Whether ``status`` runs no external command, so that it may be called every second."""

    def begin(self) -> bool:
        """Take over the run from the previous job. Returns False if this job has nothing left to do."""
        ...

    def end(self) -> None:
        """Cancel the pending jobs of the chain if the run is over or paused. Called when the job ends."""
        ...

    def status(self, *, patient: bool = True) -> JobStatus:
        """The job's status. If ``patient`` is true, retry for a few seconds if the scheduler does not respond."""
        ...

    def terminated(self) -> None:
        """Note that SIGTERM or SIGINT has arrived or is pending."""
        ...

    @property
    def kill_wait_seconds(self) -> float | None:
        """Seconds between SIGTERM and SIGKILL when the scheduler terminates the job; None if it sends no SIGKILL."""
        ...

    @property
    def proctrack(self) -> str:
        """How the scheduler finds the processes of a step: Slurm's ProctrackType; empty if unknown."""
        ...

    def dispensable(self, nodes: Sequence[str], *, needed: int) -> list[str]:
        """The ``nodes`` that can be excluded so that enough are left to start a job on ``needed`` nodes."""
        ...

    def step_state(self, job_id: str, step_id: str) -> JobState | None:
        """The state of a step of ranks in Slurm's accounting, or None if no state is found."""
        ...

    def avoid(self, nodes: Sequence[str], *, instead_of: Sequence[str], now: bool = False) -> None:
        """Exclude these nodes from the next start of the job, as soon as the scheduler accepts the change.

        Args:
            instead_of: nodes that earlier calls may have excluded; those not in ``nodes`` are allowed again.
            now: exclude the nodes at once, because the scheduler has already requeued the job.
        """
        ...

    def requeue(self) -> str:
        """Requeue the job. If the scheduler does so at once, it kills this process and the call does not return.

        Returns:
            Why the requeue failed; an empty string if the run continues once this job has ended.
        """
        ...


class LocalAllocation:
    """This machine, used as an allocation. There is no queue, the supervisor enforces the time limit, and a requeue
    runs the batch script again."""

    kill_wait_seconds = None
    proctrack = ""
    chained = False
    status_is_free = True

    def __init__(self, run: RunDir, launch: LaunchSpec) -> None:
        self.job_id = os.environ.get("HPCACCEL_LOCAL_JOB", f"local-{os.getpid():08x}")
        self.jobs: Sequence[str] = (self.job_id,)
        self.restart_count = int(os.environ.get("HPCACCEL_RESTART_COUNT", "0"))
        self.nodes = ["localhost"]
        self._script = run.script
        # The time limit counts from the start of the batch step, so that a restarted supervisor gets no extra time.
        pid, began = batch.began() or (os.getpid(), time.time())
        self._start_time = started_at(pid)
        self._end_time = None if launch.time_limit_seconds is None else began + launch.time_limit_seconds
        self._cancelled = False

    def begin(self) -> bool:
        return True

    def end(self) -> None:
        pass

    def terminated(self) -> None:
        self._cancelled = True  # SIGTERM to the supervisor is this backend's scancel

    def dispensable(self, nodes: Sequence[str], *, needed: int) -> list[str]:
        return []  # there is no other machine

    def step_state(self, job_id: str, step_id: str) -> JobState | None:
        return None

    def avoid(self, nodes: Sequence[str], *, instead_of: Sequence[str], now: bool = False) -> None:
        pass

    def status(self, *, patient: bool = True) -> JobStatus:
        return JobStatus(running=not self._cancelled, start_time=self._start_time, end_time=self._end_time)

    def requeue(self) -> str:
        if self._cancelled or signal.SIGTERM in signal.sigpending():
            return TAKEN_DOWN
        if batch.is_our_parent():
            os._exit(batch.START_AGAIN)
        environment = dict(os.environ, HPCACCEL_RESTART_COUNT=str(self.restart_count + 1))
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvpe("bash", ["bash", str(self._script)], environment)


SLOT = "HPCACCEL_SLOT"
"""Environment variable for ranks of overlapping steps: the slot (``number/of``) whose GPUs the rank uses."""
_GPUS_HERE = Path("/proc/driver/nvidia/gpus")
"""Folder with one entry per NVIDIA GPU of this machine."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A trial's share of an allocation that is divided into ``of`` equal shares, numbered from 0."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Slot:
        """Parse a slot in the form ``number/of``, such as ``0/2``."""
        number, of = text.split("/")
        return cls(number=int(number), of=int(of))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def _overlaps(self, env: Mapping[str, str]) -> bool:
        """Whether the node's GPUs cannot be divided evenly among the slots, so that their steps must overlap."""
        return bool(int(env.get("SLURM_GPUS_ON_NODE") or 0) % self.of)

    def visible(self, gpus: list[str]) -> list[str]:
        """This slot's part of ``gpus``, or one shared GPU if there are fewer GPUs than slots."""
        if not gpus:
            return []
        share = len(gpus) // self.of
        if share:
            return gpus[self.number * share : (self.number + 1) * share]
        return [gpus[self.number % len(gpus)]]

    def environment(self, env: Mapping[str, str], *, local: bool) -> dict[str, str]:
        """The environment variables that differ in this slot, with their values."""
        if self.of == 1:
            return {}
        changes: dict[str, str] = {}
        if local and (count := gpus_of(env, ["localhost"], local=True)):
            listed = env.get("CUDA_VISIBLE_DEVICES")
            gpus = [one for one in listed.split(",") if one] if listed else [str(one) for one in range(count)]
            changes["CUDA_VISIBLE_DEVICES"] = ",".join(self.visible(gpus))
        if not local and self._overlaps(env):
            changes[SLOT] = str(self)
        threads = env.get("OMP_NUM_THREADS", "")
        if threads.isdecimal() and threads == (env.get("SRUN_CPUS_PER_TASK") or env.get("SLURM_CPUS_PER_TASK")):
            changes["OMP_NUM_THREADS"] = str(max(1, int(threads) // self.of))
        return changes

    def srun_options(self, env: Mapping[str, str], *, ranks_per_node: int) -> list[str]:
        """srun options for a step with this slot's share of the allocation."""
        if self.of == 1:
            return []
        cpus = int(env.get("SLURM_CPUS_ON_NODE") or self.of) // self.of // ranks_per_node
        options = [f"--cpus-per-task={max(1, cpus)}"]
        if (memory := env.get("SLURM_MEM_PER_NODE", "")).isdecimal() and int(memory):
            options.append(f"--mem={max(1, int(memory) // self.of)}M")
        if self._overlaps(env):
            return ["--overlap", *options]
        gpus = int(env.get("SLURM_GPUS_ON_NODE") or 0)
        if gpus and "SLURM_GPUS_PER_TASK" in env:
            options.append(f"--gpus-per-task={max(1, gpus // self.of // ranks_per_node)}")
        elif gpus:
            options.append(f"--gpus-per-node={gpus // self.of}")
        return ["--exact", *options]


def gpus_of(env: Mapping[str, str], nodes: Sequence[str], *, local: bool) -> int:
    """Number of GPUs in the allocation, over all nodes."""
    if local:
        visible = env.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return len([one for one in visible.split(",") if one.strip() and one.strip() != "-1"])
        return len(list(_GPUS_HERE.iterdir())) if _GPUS_HERE.is_dir() else 0
    if env.get("SLURM_GPUS", "").isdecimal():
        return int(env["SLURM_GPUS"])
    return int(env.get("SLURM_GPUS_ON_NODE") or 0) * len(nodes)
