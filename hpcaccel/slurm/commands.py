"""The only caller of Slurm's programs: what may be asked (``job_questions``, ``site_questions``) and what changes jobs.

Three ways to fail:

- ``ClusterError``: there is no Slurm here, or Slurm refused what was asked; the user can mend it.
- ``None``, ``False`` or a missing key: Slurm does not know the job (any more).
- ``SlurmCommandError``: anything else, above all a controller that does not answer. Asking again later may help.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcaccel.errors import ClusterError, SlurmCommandError, SlurmUnreachable
from hpcaccel.slurm import hostlist
from hpcaccel.slurm.command_env import submission_environment
from hpcaccel.slurm.job_questions import STEP, JobQuestions
from hpcaccel.slurm.programs import address, is_over, is_transient, is_unreachable
from hpcaccel.slurm.queue_cache_path import note_change
from hpcaccel.slurm.refusals import explain
from hpcaccel.slurm.site_questions import SiteQuestions
from hpcaccel.slurm.start_estimates import StartEstimate, parse_estimate

__all__ = ["Slurm"]

_NODE = re.compile(r"[A-Za-z0-9][\w.-]*")
_SUBMITTED = re.compile(r"(?:^|\n)(?:Submitted batch job )?(\d+)(?:;\S*| on cluster \S+)?$")
"""On the last line; the sentence is that of a site's own sbatch, which passes --parsable over."""
_SIGNAL = re.compile(r"[A-Z][A-Z0-9]*|\d+")


class Slurm(JobQuestions, SiteQuestions):
    """Slurm's commands as methods.

    Args:
        run: stands in for ``subprocess.run``; tests hand in their own.
        timeout_seconds: how long one command may take before it counts as unanswered.
    """

    def holding(self, descriptor: int) -> Slurm:
        """The same, whose commands keep ``descriptor`` open for as long as they run: a lock on it is held until they
        have ended, even when this process has been killed."""
        if not self.is_here:
            return self
        already = self._run.keywords["pass_fds"] if isinstance(self._run, functools.partial) else ()
        run = functools.partial(subprocess.run, pass_fds=(*already, descriptor))
        return Slurm(run, timeout_seconds=self._timeout_seconds)

    def sbatch(
        self, script: Path, args: Sequence[str] = (), env: Mapping[str, str] | None = None, *, words: Sequence[str] = ()
    ) -> str:
        """Submit a script; returns the job id.

        Args:
            args: further options, before the script's name.
            words: what the script gets as its own arguments.
            env: the environment to submit from, this process's own by default. Variables of a job that we may be
                inside of are taken out, and so are ``SBATCH_*`` that would overrule what the script itself says.

        Raises:
            ClusterError: no sbatch, or Slurm refused the job; its own words are in the message.
            SlurmUnreachable: no controller could be reached.
            SlurmCommandError: the controller did not answer. It may have taken the job all the same.
        """
        command = ["sbatch", "--parsable", *args, str(script), *words]
        base = os.environ if env is None else env
        result = self._start(command, env=submission_environment(base, script=script.read_text(encoding="utf-8")))
        answer = _SUBMITTED.search(result.stdout.strip())
        if result.returncode == 0 and answer is not None:
            self._changed()
            return answer[1]
        if result.returncode != 0 and is_unreachable(result.stderr):
            raise SlurmUnreachable(command, result.returncode, result.stderr)
        if result.returncode == 0 or is_transient(result.stderr):
            raise SlurmCommandError(command, result.returncode, result.stderr or f"unexpected answer {result.stdout!r}")
        raise ClusterError(explain(result.stderr, self._partition_names))

    def test_only(self, script: Path, args: Sequence[str] = ()) -> StartEstimate:
        """When Slurm would start this script, as ``sbatch --test-only`` says; nothing is submitted.

        Raises:
            ClusterError: no sbatch.
            SlurmCommandError: the controller did not answer.
        """
        command = ["sbatch", "--test-only", *args, str(script)]
        text = script.read_text(encoding="utf-8")
        result = self._start(command, env=submission_environment(os.environ, script=text))
        if result.returncode == 0 and (estimate := parse_estimate(result.stderr + result.stdout)) is not None:
            return estimate
        if result.returncode == 0 or is_transient(result.stderr):
            raise SlurmCommandError(command, result.returncode, result.stderr or f"unexpected answer {result.stdout!r}")
        return StartEstimate(refusal=explain(result.stderr, self._partition_names))

    def cancel(self, job_id: str, *, only_pending: bool = False) -> None:
        """Cancel a job, an array or one of its tasks. One that is over, or unknown to Slurm, is no error.

        Args:
            only_pending: leave alone what has started.
        """
        command = ["scancel", *(["--state=PENDING"] if only_pending else []), address(job_id)]
        result = self._start(command)
        if result.returncode != 0 and not is_over(result.stderr):
            raise self._refused(command, result)
        self._changed()

    def signal_step(self, job_id: str, step_id: str | int, signal: str) -> bool:
        """Send a signal (``TERM``, ``USR1``) to all processes of a step. False: the step is over."""
        if not STEP.fullmatch(str(step_id)) or not _SIGNAL.fullmatch(signal):
            raise ValueError(f"step {step_id!r}, signal {signal!r}: wanted are e.g. step 0 and signal 'TERM'")
        command = ["scancel", f"--signal={signal}", f"{address(job_id)}.{step_id}"]
        result = self._start(command)
        if result.returncode == 0:
            return True
        if is_over(result.stderr):
            return False
        raise self._refused(command, result)

    def requeue(self, job_id: str) -> bool:
        """Put a running job back into the queue; it is killed at once, with everything in it.

        For a task of an array ``job_id`` must be ``46_0``: the number alone may stand for all tasks. False: Slurm has
        put it there already ("pending execution").

        Beware: a job that is being cancelled (COMPLETING) would come back too. Ask for its state first.

        Raises:
            ClusterError: the job may not be requeued: a site can take --requeue away from it.
        """
        command = ["scontrol", "requeue", address(job_id)]
        result = self._start(command)
        if result.returncode == 0:
            return True
        if "pending execution" in result.stderr:
            return False
        raise self._refused(command, result)

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """Keep a waiting job away from these nodes, and from no others.

        A job that was told to requeue counts as waiting while it is still being taken down.

        Raises:
            SlurmCommandError: it runs, or there is no such node.
        """
        if bad := [node for node in nodes if not _NODE.fullmatch(node)]:
            raise ValueError(f"node {bad[0]!r} is no node's name")
        command = ["scontrol", "update", f"JobId={address(job_id)}", f"ExcNodeList={hostlist.compress(nodes)}"]
        result = self._start(command)
        if result.returncode != 0:
            raise self._refused(command, result)

    def depend(self, job_id: str, dependency: str) -> None:
        """Have a job that waits in the queue wait for others; one that has started or ended stays as it is.

        Raises:
            SlurmCommandError: Slurm did not answer, or refused.
        """
        command = ["scontrol", "update", f"JobId={address(job_id)}", f"Dependency={dependency}"]
        result = self._start(command)
        started = re.search(r"no longer pending|is not pending|already|Job has finished", result.stderr, re.IGNORECASE)
        if result.returncode != 0 and not is_over(result.stderr) and not started:
            raise SlurmCommandError(command, result.returncode, result.stderr)

    def throttle(self, job_id: str, most: int) -> None:
        """Let at most so many tasks of an array run at a time; those that run already go on. 0: as many as fit.

        Raises:
            SlurmCommandError: the array is over.
        """
        command = ["scontrol", "update", f"JobId={address(job_id)}", f"ArrayTaskThrottle={most}"]
        result = self._start(command)
        if result.returncode != 0:
            raise self._refused(command, result)
        self._changed()

    def shell_command(self, job_id: str, *, node: str | None = None, terminal: bool = True) -> list[str]:
        """The command that opens a shell in a running job, beside its ranks; for exec, since it needs the terminal.

        Args:
            node: name of one of the job's nodes; None: its first.
            terminal: False where the shell's input or output is a pipe or a file.
        """
        where = [] if node is None else [f"--nodelist={node}"]
        one_task = ["--nodes=1", "--ntasks=1", *where]
        return ["srun", f"--jobid={address(job_id)}", "--overlap", *one_task, *(["--pty"] if terminal else []), "bash"]

    def _changed(self) -> None:
        """Not for requeue: that kills its caller, who has little time left, and the run's ledger tells of it."""
        if self.is_here:
            note_change()

    def _partition_names(self) -> list[str]:
        return [partition.name for partition in self.partitions()]
