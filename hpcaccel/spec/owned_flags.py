"""Options of sbatch and srun that hpcaccel sets itself, and what a user sets instead."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["HETEROGENEOUS", "OWNED_FLAGS", "extra_advice", "owned_by_srun"]

HETEROGENEOUS = (
    "is written as components, beside slurm, whose nodes are the ranks': "
    "components: {data: {entrypoint: {script: serve.py}, slurm: {partition: cpu, nodes: 2}}}"
)

OWNED_FLAGS = {
    "array": "is made by `hpcaccel submit --grid`",
    "chdir": "is set by workdir",
    "error": "is not to be set: every rank's log is kept in the run directory (`hpcaccel logs`)",
    "export": "is made from environment.env and environment.secrets",
    "export-file": "is made from environment.env and environment.secrets",
    "gpus": "depends on the number of nodes: set slurm.gpus_per_node, slurm.gpus_per_task or slurm.gres",
    "help": "submits no job",
    "input": "is not to be set: ranks have no input; pass a path in entrypoint.args",
    "job-name": "is set by name",
    "no-requeue": "is set by resilience.requeue: false",
    "ntasks": "is nodes × ntasks_per_node: set slurm.nodes and slurm.ntasks_per_node",
    "open-mode": "is not to be set: a requeued job appends to its logs",
    "output": "is not to be set: every rank's log is kept in the run directory (`hpcaccel logs`)",
    "parsable": "is set by hpcaccel, which reads the job id",
    "quiet": "is not to be set: hpcaccel reads what sbatch says",
    "requeue": "is set by resilience.requeue",
    "signal": "is set by resilience.warning_seconds",
    "test-only": "submits no job: use `hpcaccel validate`",
    "usage": "submits no job",
    "version": "submits no job",
    "wait": "is `hpcaccel submit --wait`",
    "wrap": "is not to be set: entrypoint says what runs",
}
"""By sbatch's long names; the words follow the name of the option."""

_SRUN_LONG = (
    "error", "export", "gpus", "input", "jobid", "job-name", "kill-on-bad-exit", "label", "nodes", "nodelist", "ntasks",
    "ntasks-per-node", "open-mode", "output", "unbuffered", "wait",
)  # fmt: skip
_SRUN_SHORT = {
    "-e": "error", "-G": "gpus", "-i": "input", "-J": "job-name", "-K": "kill-on-bad-exit", "-l": "label",
    "-N": "nodes", "-n": "ntasks", "-o": "output", "-u": "unbuffered", "-W": "wait", "-w": "nodelist",
}  # fmt: skip


def extra_advice(flag: str, fields: Iterable[str]) -> str | None:
    """Why an option may not stand under ``slurm.extra``, or None where it may; ``fields`` are the section's keys."""
    if flag in ("het-group", "hetjob"):
        return HETEROGENEOUS
    elsewhere = {name.replace("_", "-"): f"is set by slurm.{name}" for name in fields if name != "extra"} | OWNED_FLAGS
    if flag in elsewhere:
        return elsewhere[flag]
    # sbatch takes every unique abbreviation of a long option: --sig is --signal.
    for name, advice in elsewhere.items():
        if name.startswith(flag):
            return f"is short for {name}, which {advice}"
    return None


def owned_by_srun(word: str) -> str | None:
    """The option that hpcaccel gives srun itself and that ``word`` would set, abbreviated or not; otherwise None."""
    if not word.startswith("--"):
        return _SRUN_SHORT.get(word[:2])
    flag = word[2:].partition("=")[0]
    return next((name for name in _SRUN_LONG if name == flag or (len(flag) > 2 and name.startswith(flag))), None)
