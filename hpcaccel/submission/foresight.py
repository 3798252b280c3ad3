"""What can be told of a training script before it has cost an hour: whether it will come back as its user expects."""

from __future__ import annotations

import ast
from pathlib import Path

from hpcaccel.errors import HpcaccelError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec import JobSpec
from hpcaccel.submission.codecopy import CodePlan
from hpcaccel.submission.entry import Entry

__all__ = ["advice", "advice_on_cluster", "advice_on_job"]

_LOADS = {"resume", "epochs", "steps", "load_state"}
"""Each of these takes up the newest checkpoint."""


def advice(spec: JobSpec, entry: Entry, plan: CodePlan | None) -> tuple[str, ...]:
    """Sentences for the user of a script that reads well but would start anew, or be killed, at its first preemption.

    Only what stands in the copied Python files is seen; a name found anywhere in them counts.
    """
    if spec.entrypoint.kind == "command" or entry.file is None or entry.file.suffix != ".py":
        return ()
    files = [entry.file] if plan is None else [plan.root / name for name in plan.files if name.suffix == ".py"]
    names: set[str] = set()
    for file in files:
        names |= _names(file)
    shown = entry.file.name
    if "hpcaccel" not in names:
        if spec.stop_mode == "signals":
            return ()
        return (
            f"{shown} does not use hpcaccel, so nothing in it saves and leaves when it is asked to: set "
            "runtime.stop to signals, and it gets SIGTERM as from Slurm itself",
        )
    if "Accelerator" in names and not names & _LOADS:
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


def _names(file: Path) -> set[str]:
    """All modules that a file imports (their first word), names it imports and attributes it asks for."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()  # the ranks will say it better
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found
