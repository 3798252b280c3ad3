"""What can be told of a training script before it has cost an hour: whether it will come back as its user expects."""

from __future__ import annotations

import importlib.util
import os
import sys

from hpcaccel.errors import HpcaccelError, SpecError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.expedited_requeue import why_not_expedited
from hpcaccel.spec import JobSpec
from hpcaccel.submission.code_copy import CodePlan
from hpcaccel.submission.entry import Entry, python_of_ranks
from hpcaccel.submission.imports import Used, used_by

__all__ = ["advice", "advice_on_cluster", "advice_on_job", "advice_on_machine", "refuse_expedite"]

MANY_RANKS_PER_CORE = 16
_LOADS = {"resume", "epochs", "steps", "load_state"}
"""Each of these takes up the newest checkpoint."""


def advice(spec: JobSpec, entry: Entry, plan: CodePlan | None) -> tuple[str, ...]:
    """Sentences for the user of a script that reads well but would start anew, or be killed, at its first preemption.

    Only the script is seen, and what it imports from the folder of its code; a name found anywhere in these counts.
    """
    if spec.entrypoint.kind == "command" or entry.file is None:
        return ()
    used, shown = used_by(entry, plan), entry.file.name
    return (*_on_stopping(spec, used, shown), *_on_torch(spec, used, shown))


def _on_torch(spec: JobSpec, used: Used, shown: str) -> tuple[str, ...]:
    """A core-only install has no torch, and ranks start with its Python unless the spec names another."""
    wants_it = "torch" in used.modules or "Accelerator" in used.ours
    if not wants_it or python_of_ranks(spec) != sys.executable or importlib.util.find_spec("torch") is not None:
        return ()
    return (
        f"{shown} needs torch, and the ranks would start in hpcaccel's own environment, which has none "
        f"({sys.executable}): name the one that has it (environment.venv, conda, modules, python or a container)",
    )


def _on_stopping(spec: JobSpec, used: Used, shown: str) -> tuple[str, ...]:
    if not used.hears_a_stop:
        if spec.runtime.stop is None:
            return (
                f"neither {shown} nor what it imports from its folder uses hpcaccel.Accelerator, so it gets SIGTERM "
                "when it is to stop, as from Slurm itself (runtime.stop: signals)",
            )
        if spec.runtime.stop == "signals":
            return ()
        return (
            f"neither {shown} nor what it imports from its folder uses hpcaccel.Accelerator, so nothing in it saves "
            "and leaves when it is asked to (runtime.stop: cooperative): leave runtime.stop out, and it gets SIGTERM "
            "as from Slurm itself",
        )
    if "Accelerator" in used.ours and not used.attributes & _LOADS:
        return (
            f"{shown} never loads a checkpoint: after a preemption it would train from the start. Loop over "
            "accelerator.epochs() or steps(), or call accelerator.resume() after prepare()",
        )
    return ()


def advice_on_cluster(spec: JobSpec, slurm: Slurm) -> tuple[str, ...]:
    """What the cluster does with a job that is to come back, where the user has not seen to it.

    ``JobRequeue=0`` alone is no obstacle: it is a default, and the batch script says --requeue (slurm.conf(5)).
    """
    if spec.resilience.chain is not None or not spec.resilience.requeue:
        return ()
    try:
        partitions = {one.name: one for one in slurm.partitions()}
    except HpcaccelError:
        return ()  # this is but advice: submitting says better what is wrong with the cluster
    default = next((name for name, one in partitions.items() if one.default), "")
    wanted = (spec.slurm.partition or default).split(",")
    cancelling = [name for name in wanted if name in partitions and partitions[name].preempt_mode.upper() == "CANCEL"]
    if not cancelling:
        return ()
    return (
        f"partition {', '.join(cancelling)} preempts by cancelling (PreemptMode=CANCEL), and a job that is preempted "
        "without grace time does not come back from that: set resilience.chain to how many jobs may follow each other",
    )


def refuse_expedite(spec: JobSpec, slurm: Slurm) -> None:
    """Raises SpecError where the spec wants an expedited requeue and the cluster does not have it."""
    if spec.resilience.requeue != "expedite":
        return
    try:
        why = why_not_expedited(slurm.config())
    except HpcaccelError:
        return  # submitting says better what is wrong with the cluster
    if why:
        raise SpecError([f"resilience.requeue: expedite is not to be had here: {why}. Set it to true"])


def advice_on_machine(spec: JobSpec) -> tuple[str, ...]:
    """What this machine cannot do, where the ranks are to run on it."""
    ranks, cores = spec.slurm.min_nodes * spec.ranks_per_node, os.cpu_count() or 1
    if ranks <= MANY_RANKS_PER_CORE * cores:
        return ()
    return (
        f"{ranks:,} ranks are to start on this machine, which has {cores} core{'s' if cores > 1 else ''}: each is a "
        "process of its own. Fewer are slurm.ntasks_per_node",
    )


def advice_on_job(spec: JobSpec, slurm: Slurm, job_id: str) -> tuple[str, ...]:
    """What has become of a job that was handed in a moment ago: a site's plugin may take --requeue out of it."""
    if spec.resilience.chain is not None or not spec.resilience.requeue:
        return ()
    try:
        job = slurm.job(job_id)
    except HpcaccelError:
        return ()
    if job is None or job.requeue:
        return ()
    return (
        f"this cluster has taken --requeue out of job {job_id}: it will not come back after a preemption or its time "
        "limit. Set resilience.chain to how many jobs may follow each other",
    )
