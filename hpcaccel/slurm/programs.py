"""Run Slurm's programs, with a suitable environment and a time limit.

A command is a list of arguments, not a line for a shell. Slurm reads defaults and filters for every command from
environment variables, and sets about a hundred more inside a job. Queries must give the same output for every user, and
a job submitted from inside another job must not inherit the size and layout of that job. This module therefore removes
both kinds of variables.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

from hpcaccel.core import progress_notes
from hpcaccel.core.progress_notes import show_note_when_slow
from hpcaccel.errors import ClusterError, SlurmCommandError
from hpcaccel.slurm.error_messages import has_no_accounting

__all__ = ["Programs", "Run", "address", "query_environment", "script_options", "submission_environment"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]
"""Signature of ``subprocess.run``."""
_ADDRESS = re.compile(r"\d+(?:_\d+|\+\d+)?")


class Programs:
    """Base class that runs Slurm's programs and converts their failures to exceptions.

    Args:
        run: replaces ``subprocess.run``, in tests and on a connection to another machine.
        timeout_seconds: time limit of one command.
    """

    def __init__(self, run: Run = subprocess.run, *, timeout_seconds: float = 60.0) -> None:
        self._run = run
        self._timeout_seconds = timeout_seconds

    @property
    def is_here(self) -> bool:
        """Whether commands run on this machine, not through a replacement for ``subprocess.run``."""
        return getattr(self._run, "func", self._run) is subprocess.run

    def available(self) -> bool:
        """Whether sbatch is on this machine's PATH."""
        return shutil.which("sbatch") is not None

    def _output(self, command: list[str]) -> str:
        result = self._start(command)
        if result.returncode != 0:
            raise SlurmCommandError(command, result.returncode, result.stderr)
        return result.stdout

    def _accounting_output(self, command: list[str]) -> str | None:
        """Output of sacct or sacctmgr; None if the cluster has no accounting."""
        result = self._start(command)
        if result.returncode == 0:
            return result.stdout
        if has_no_accounting(result.stderr):
            return None
        raise SlurmCommandError(command, result.returncode, result.stderr)

    def _lacks(self, program: str) -> bool:
        """Whether commands run on this machine and it does not have ``program``."""
        return self.is_here and shutil.which(program) is None

    def _refused(self, command: Sequence[str], result: subprocess.CompletedProcess[str]) -> Exception:
        if re.search(r"access/permission denied|presently disabled", result.stderr, re.IGNORECASE):
            return ClusterError(f"Slurm refused `{' '.join(command)}`: {result.stderr.strip()}")
        return SlurmCommandError(command, result.returncode, result.stderr)

    def _silence(self, program: str) -> str:
        return (
            f"{program} has not responded for {progress_notes.SILENT_SECONDS:g} s; waiting for up to "
            f"{self._timeout_seconds:g} s. The Slurm controller may be down or busy"
        )

    def _start(self, command: list[str], *, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        try:
            with show_note_when_slow(self._silence(command[0])):
                return self._run(
                    command,
                    env=query_environment(os.environ) if env is None else env,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    encoding="utf-8",
                    errors="replace",
                    timeout=self._timeout_seconds,
                    check=False,
                )
        except FileNotFoundError:
            raise ClusterError(
                f"{command[0]} was not found on this machine. Log in to a node of the cluster, load its Slurm module, "
                "or use the local backend: --cluster local"
            ) from None
        except subprocess.TimeoutExpired:
            message = f"no response within {self._timeout_seconds:g} s; the Slurm controller may be down or busy"
            raise SlurmCommandError(command, 124, message) from None


def address(job_id: str) -> str:
    """Check a job id and return it unchanged.

    Raises:
        ValueError: ``job_id`` is not a job id. Slurm might read it as an option.
    """
    if not _ADDRESS.fullmatch(job_id):
        raise ValueError(f"{job_id!r} is not a job ID: use a number, <array>_<task> (46_3) or <job>+<component> (18+1)")
    return job_id


# -- environments -------------------------------------------------------------------------------------------------

_JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
"""Prefixes of the variables that Slurm sets inside a job."""
_FILTER_PREFIXES = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
"""Prefixes of the variables with the user's filters and output formats."""
_CLUSTER_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_KEY"})
"""Variables needed to reach the cluster. They are kept when a job submits another job."""
_INPUT_NAMES = {
    "array": "ARRAY_INX",
    "mem": "MEM_PER_NODE",
    "time": "TIMELIMIT",
    "nodes": "NUM_NODES",
    "output": "OUTPUT",
}
"""Names of SBATCH_ variables, without the prefix, by sbatch option. Other variables have the option's name."""


def query_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Environment for queries: English messages, ISO times, without the user's filters and output formats."""
    kept = {name: value for name, value in base.items() if not name.startswith(_FILTER_PREFIXES)}
    return {**kept, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}


def submission_environment(base: Mapping[str, str], *, script: str) -> dict[str, str]:
    """Environment for sbatch, without variables of a surrounding job or SBATCH_ variables that override the script.

    Outside a job, defaults of the site or the user (such as SBATCH_ACCOUNT in ~/.profile) stay for options that the
    script does not set, except SBATCH_ARRAY_INX.

    Args:
        script: the text of the batch script.
    """
    inside_a_job = "SLURM_JOB_ID" in base or "SLURM_JOBID" in base
    overriding = _variables_of(script_options(script))
    dropped = {"SLURM_EXPORT_ENV"}
    for name in base:
        if name.startswith("SBATCH_") and (inside_a_job or name in overriding):
            dropped.add(name)
        if inside_a_job and name.startswith(_JOB_PREFIXES) and name not in _CLUSTER_VARIABLES:
            dropped.add(name)
    # LC_ALL is not set: --export=ALL would copy it into the job. Slurm's messages are always English.
    return {name: value for name, value in base.items() if name not in dropped}


def script_options(script: str) -> set[str]:
    """The first long option of each #SBATCH line of a batch script."""
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
        names.add("SBATCH_ARRAY_INX")  # would turn a single job into an array
    return names
