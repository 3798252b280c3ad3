"""How Slurm's programs are started, and what their failures mean.

A command is a list of arguments, never a shell's line; it has a time limit, speaks English (``LC_ALL=C``), and is not
swayed by what the user's environment says about formats and filters.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence

from hpcaccel.core import progress_notes
from hpcaccel.core.progress_notes import told_when_slow
from hpcaccel.errors import ClusterError, SlurmCommandError
from hpcaccel.slurm.command_env import query_environment

__all__ = ["Programs", "Run", "address", "is_over", "is_transient", "is_unknown_job", "is_unreachable"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]
"""What stands in for ``subprocess.run``."""
_ADDRESS = re.compile(r"\d+(?:_\d+|\+\d+)?")


class Programs:
    """Starts one program after the other.

    Args:
        run: stands in for ``subprocess.run``; tests hand in their own.
        timeout_seconds: how long one command may take before it counts as unanswered.
    """

    def __init__(self, run: Run = subprocess.run, *, timeout_seconds: float = 60.0) -> None:
        self._run = run
        self._timeout_seconds = timeout_seconds

    @property
    def is_here(self) -> bool:
        """Whether this is the Slurm of this machine, for all that is run on it, and no stand-in."""
        return getattr(self._run, "func", self._run) is subprocess.run

    def available(self) -> bool:
        """Whether jobs can be submitted from this machine, as far as its PATH tells."""
        return shutil.which("sbatch") is not None

    def _output(self, command: list[str]) -> str:
        result = self._start(command)
        if result.returncode != 0:
            raise SlurmCommandError(command, result.returncode, result.stderr)
        return result.stdout

    def _recorded(self, command: list[str]) -> str | None:
        """What sacct or sacctmgr prints; None where there is no accounting."""
        result = self._start(command)
        if result.returncode == 0:
            return result.stdout
        if _has_no_accounting(result.stderr):
            return None
        raise SlurmCommandError(command, result.returncode, result.stderr)

    def _lacks(self, program: str) -> bool:
        """Whether this machine, if it is the one that is asked, does not have it."""
        return self.is_here and shutil.which(program) is None

    def _refused(self, command: Sequence[str], result: subprocess.CompletedProcess[str]) -> Exception:
        if re.search(r"access/permission denied|presently disabled", result.stderr, re.IGNORECASE):
            return ClusterError(f"Slurm refused `{' '.join(command)}`: {result.stderr.strip()}")
        return SlurmCommandError(command, result.returncode, result.stderr)

    def _silence(self, program: str) -> str:
        return (
            f"{program} has had no answer from Slurm for {progress_notes.SILENT_SECONDS:g} s; waiting for at most "
            f"{self._timeout_seconds:g} s. The controller may be down or busy"
        )

    def _start(self, command: list[str], *, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        try:
            with told_when_slow(self._silence(command[0])):
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
                f"there is no {command[0]} on this machine. Log in to a node of the cluster, load its slurm module, "
                "or use the local backend: --cluster local"
            ) from None
        except subprocess.TimeoutExpired:
            message = f"no answer within {self._timeout_seconds:g} s; the Slurm controller may be down or busy"
            raise SlurmCommandError(command, 124, message) from None


def address(job_id: str) -> str:
    """``job_id`` itself; raises ValueError for what could be anything else on a command line."""
    if not _ADDRESS.fullmatch(job_id):
        raise ValueError(f"job id {job_id!r}: wanted is a number, or <array>_<task> such as 46_3")
    return job_id


def is_unknown_job(stderr: str) -> bool:
    return "Invalid job id" in stderr or "Invalid job array specification" in stderr


def is_over(stderr: str) -> bool:
    return is_unknown_job(stderr) or "already completing or completed" in stderr


def is_transient(stderr: str) -> bool:
    """Whether the controller, not the request, is at fault."""
    return bool(
        re.search(
            r"unable to contact slurm controller|connect failure|socket timed out|connection (refused|reset|timed out)"
            r"|zero bytes were transmitted|transport endpoint|slurm_?dbd|authentication|munge"
            r"|temporarily unable|backup controller|resource temporarily unavailable|standby mode",
            stderr,
            re.IGNORECASE,
        )
    )


def is_unreachable(stderr: str) -> bool:
    """Whether no connection to the controller could be made, so that it has heard nothing.

    Behind a "send failure", "receive failure" or "shutdown failure" it may have taken what it was handed.
    """
    return "unable to contact slurm controller (connect failure)" in stderr.lower()


def _has_no_accounting(stderr: str) -> bool:
    return "accounting storage is disabled" in stderr or "not running a supported accounting_storage" in stderr
