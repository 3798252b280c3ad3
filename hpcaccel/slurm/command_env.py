"""The environment in which Slurm's programs are started.

Slurm reads defaults and filters for every command from variables, and sets a hundred more inside of a job. A tool
must get the same answers for everybody, and a job that is submitted from inside another must not inherit its shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["query_environment", "script_options", "submission_environment"]

_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
_FILTERS = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")

_KEPT_INSIDE_A_JOB = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_KEY"})
"""How to reach the cluster: configuration, not the shape of the job around us."""

_INPUT_NAMES = {
    "array": "ARRAY_INX",
    "mem": "MEM_PER_NODE",
    "time": "TIMELIMIT",
    "nodes": "NUM_NODES",
    "output": "OUTPUT",
}
"""sbatch's options whose SBATCH_ variable is not simply their name."""


def query_environment(base: Mapping[str, str]) -> dict[str, str]:
    """For commands that ask: English, ISO times, nobody's filters and formats."""
    kept = {name: value for name, value in base.items() if not name.startswith(_FILTERS)}
    return {**kept, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}


def submission_environment(base: Mapping[str, str], *, script: str) -> dict[str, str]:
    """For sbatch: nothing of a job around us, and no SBATCH_ variable that overrules the script.

    Outside of a job, a site's or user's defaults (SBATCH_ACCOUNT in a profile) stay, for what the script leaves open.
    """
    inside_a_job = "SLURM_JOB_ID" in base or "SLURM_JOBID" in base
    overruled = _variables_of(script_options(script))
    dropped = {"SLURM_EXPORT_ENV"}
    for name in base:
        if name.startswith("SBATCH_") and (inside_a_job or name in overruled):
            dropped.add(name)
        if inside_a_job and name.startswith(_OF_A_JOB) and name not in _KEPT_INSIDE_A_JOB:
            dropped.add(name)
    # No LC_ALL: it would travel into a job that is submitted with --export=ALL, and Slurm speaks English only.
    return {name: value for name, value in base.items() if name not in dropped}


def script_options(script: str) -> set[str]:
    """The long options that a batch script names in its #SBATCH lines."""
    return set(re.findall(r"(?m)^#SBATCH\s+--([a-z0-9-]+)", script))


def _variables_of(options: set[str]) -> set[str]:
    names = set()
    for option in options:
        plain = option.upper().replace("-", "_")
        names |= {f"SBATCH_{plain}", f"SBATCH_{_INPUT_NAMES.get(option, plain)}"}
    if options & {"requeue", "no-requeue"}:
        names |= {"SBATCH_REQUEUE", "SBATCH_NO_REQUEUE"}
    if options & {"mem", "mem-per-cpu", "mem-per-gpu"}:
        names |= {"SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"}
    if "array" not in options:
        names.add("SBATCH_ARRAY_INX")  # a single job must not become an array behind our back
    return names
