"""Slurm's commands as methods: queries (inherited from ``queries``) and commands that change jobs.

There are three kinds of failure:

- ``ClusterError``: there is no Slurm on this machine, or Slurm rejected a job or denied access. The user can fix it.
- ``None``, ``False`` or a missing key: usually, Slurm has no record of the job, or no longer has one.
- ``SlurmCommandError``: everything else, usually a controller that does not respond. A retry may succeed.
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
from hpcaccel.slurm.error_messages import explain, is_over, is_transient, is_unreachable
from hpcaccel.slurm.parsing import StartEstimate, parse_estimate
from hpcaccel.slurm.programs import address, submission_environment
from hpcaccel.slurm.queries import STEP, Queries
from hpcaccel.slurm.queue_cache_files import note_change

__all__ = ["Slurm"]

_NODE = re.compile(r"[A-Za-z0-9][\w.-]*")
"""Valid node names."""
_SUBMITTED = re.compile(r"(?:^|\n)(?:Submitted batch job )?(\d+)(?:;\S*| on cluster \S+)?$")
"""Matches the last line of sbatch's output. Site wrappers that ignore --parsable print a sentence with the job id."""
_SIGNAL = re.compile(r"[A-Z][A-Z0-9]*|\d+")
"""Valid signals: a name without ``SIG``, or a number."""


class Slurm(Queries):
    """Slurm's queries, and the commands that submit, cancel and change jobs.

    Args:
        run: replaces ``subprocess.run``, in tests and on a connection to another machine.
        timeout_seconds: time limit of one command.
    """

    def holding(self, descriptor: int) -> Slurm:
        """A copy of this object whose commands inherit the file descriptor ``descriptor``.

        A lock on the file is held until the commands have exited, even if this process is killed. If commands do not
        run on this machine, this object itself is returned.
        """
        if not self.is_here:
            return self
        inherited = self._run.keywords["pass_fds"] if isinstance(self._run, functools.partial) else ()
        run = functools.partial(subprocess.run, pass_fds=(*inherited, descriptor))
        return Slurm(run, timeout_seconds=self._timeout_seconds)

    def sbatch(
        self, script: Path, args: Sequence[str] = (), env: Mapping[str, str] | None = None, *, words: Sequence[str] = ()
    ) -> str:
        """Submit a script.

        Args:
            args: further sbatch options.
            words: arguments of the script.
            env: the environment to submit from; default: this process's. Variables of an enclosing job are removed, and
                so are ``SBATCH_*`` variables that would override the script's own options.

        Returns:
            The job id.

        Raises:
            ClusterError: there is no sbatch, or Slurm rejected the job; the message contains Slurm's error.
            SlurmUnreachable: no controller could be reached.
            SlurmCommandError: the controller did not respond, or sbatch printed no job id. The job may still have been
                accepted.
        """
        command = ["sbatch", "--parsable", *args, str(script), *words]
        base = os.environ if env is None else env
        result = self._start(command, env=submission_environment(base, script=script.read_text(encoding="utf-8")))
        submitted = _SUBMITTED.search(result.stdout.strip())
        if result.returncode == 0 and submitted is not None:
            self._changed()
            return submitted[1]
        if result.returncode != 0 and is_unreachable(result.stderr):
            raise SlurmUnreachable(command, result.returncode, result.stderr)
        if result.returncode == 0 or is_transient(result.stderr):
            raise SlurmCommandError(command, result.returncode, result.stderr or f"unexpected output {result.stdout!r}")
        raise ClusterError(explain(result.stderr, self._partition_names))

    def test_only(self, script: Path, args: Sequence[str] = ()) -> StartEstimate:
        """Estimated start of this script, or why Slurm would reject it, from ``sbatch --test-only``. Submits nothing.

        Raises:
            ClusterError: there is no sbatch.
            SlurmCommandError: the controller did not respond, or sbatch printed no estimate.
        """
        command = ["sbatch", "--test-only", *args, str(script)]
        text = script.read_text(encoding="utf-8")
        result = self._start(command, env=submission_environment(os.environ, script=text))
        if result.returncode == 0 and (estimate := parse_estimate(result.stderr + result.stdout)) is not None:
            return estimate
        if result.returncode == 0 or is_transient(result.stderr):
            raise SlurmCommandError(command, result.returncode, result.stderr or f"unexpected output {result.stdout!r}")
        return StartEstimate(refusal=explain(result.stderr, self._partition_names))

    def cancel(self, job_id: str, *, only_pending: bool = False) -> None:
        """Cancel a job, an array or one of its tasks. A job that has ended or is unknown is not an error.

        Args:
            only_pending: do not cancel jobs that have started.
        """
        command = ["scancel", *(["--state=PENDING"] if only_pending else []), address(job_id)]
        result = self._start(command)
        if result.returncode != 0 and not is_over(result.stderr):
            raise self._refused(command, result)
        self._changed()

    def signal_step(self, job_id: str, step_id: str | int, signal: str) -> bool:
        """Send a signal (``TERM``, ``USR1``) to all processes of a step. Returns False if the step has ended."""
        if not STEP.fullmatch(str(step_id)) or not _SIGNAL.fullmatch(signal):
            raise ValueError(f"step {step_id!r} or signal {signal!r} is invalid: use e.g. step 0 and signal 'TERM'")
        command = ["scancel", f"--signal={signal}", f"{address(job_id)}.{step_id}"]
        result = self._start(command)
        if result.returncode == 0:
            return True
        if is_over(result.stderr):
            return False
        raise self._refused(command, result)

    def requeue(self, job_id: str) -> bool:
        """Requeue a running job. Slurm kills all of its processes at once.

        A job that is being cancelled (COMPLETING) would be requeued too: check its state first.

        Args:
            job_id: ``46_0`` for an array task; the plain id may mean all tasks.

        Returns:
            True if the job was requeued; False if it was already back in the queue ("pending execution").

        Raises:
            ClusterError: Slurm does not allow the requeue, for example because the site removes ``--requeue``.
            SlurmCommandError: the job has ended, or the controller did not respond.
        """
        command = ["scontrol", "requeue", address(job_id)]
        result = self._start(command)
        if result.returncode == 0:
            return True
        if "pending execution" in result.stderr:
            return False
        raise self._refused(command, result)

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """Set the excluded nodes of a pending job, replacing earlier ones.

        A requeued job counts as pending while its processes are still being killed.

        Raises:
            ValueError: one of ``nodes`` is not a node name.
            SlurmCommandError: the job is running, there is no such node, or the controller did not respond.
        """
        if bad := [node for node in nodes if not _NODE.fullmatch(node)]:
            raise ValueError(f"{bad[0]!r} is not a node name")
        command = ["scontrol", "update", f"JobId={address(job_id)}", f"ExcNodeList={hostlist.compress(nodes)}"]
        result = self._start(command)
        if result.returncode != 0:
            raise self._refused(command, result)

    def depend(self, job_id: str, dependency: str) -> None:
        """Set the dependency of a pending job. A job that has started or ended is left unchanged.

        Raises:
            SlurmCommandError: the controller did not respond, or rejected the request.
        """
        command = ["scontrol", "update", f"JobId={address(job_id)}", f"Dependency={dependency}"]
        result = self._start(command)
        started = re.search(r"no longer pending|is not pending|already|Job has finished", result.stderr, re.IGNORECASE)
        if result.returncode != 0 and not is_over(result.stderr) and not started:
            raise SlurmCommandError(command, result.returncode, result.stderr)

    def throttle(self, job_id: str, most: int) -> None:
        """Limit how many tasks of an array run at a time. Running tasks are not stopped.

        Args:
            most: the maximum number of running tasks; 0 means no limit.

        Raises:
            SlurmCommandError: the array has ended, or the controller did not respond.
        """
        command = ["scontrol", "update", f"JobId={address(job_id)}", f"ArrayTaskThrottle={most}"]
        result = self._start(command)
        if result.returncode != 0:
            raise self._refused(command, result)
        self._changed()

    def shell_command(self, job_id: str, *, node: str | None = None, terminal: bool = True) -> list[str]:
        """Command that opens a shell in a running job, alongside its ranks. Run it with exec: it needs the terminal.

        Args:
            node: name of one of the job's nodes; None means the first node.
            terminal: whether the shell gets a terminal; False if its input or output is a pipe or a file.
        """
        where = [] if node is None else [f"--nodelist={node}"]
        one_task = ["--nodes=1", "--ntasks=1", *where]
        return ["srun", f"--jobid={address(job_id)}", "--overlap", *one_task, *(["--pty"] if terminal else []), "bash"]

    def _changed(self) -> None:
        """Invalidate the queue cache. Not needed after a requeue, which kills the caller and is noted in the ledger."""
        if self.is_here:
            note_change()

    def _partition_names(self) -> list[str]:
        return [partition.name for partition in self.partitions()]
