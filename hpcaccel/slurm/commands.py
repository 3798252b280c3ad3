"""The only caller of Slurm's programs.

A command is a list of arguments, never a shell's line; it has a time limit, speaks English (``LC_ALL=C``), and is not
swayed by what the user's environment says about formats and filters. Three ways to fail:

- ``ClusterError``: there is no Slurm here, or Slurm refused what was asked; the user can mend it.
- ``None``, ``False`` or a missing key: Slurm does not know the job (any more).
- ``SlurmCommandError``: anything else, above all a controller that does not answer. Asking again later may help.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcaccel.errors import ClusterError, SlurmCommandError
from hpcaccel.slurm import hostlist, output, site_output
from hpcaccel.slurm.environment import query_environment, submission_environment
from hpcaccel.slurm.queue_place import note_change
from hpcaccel.slurm.refusals import explain
from hpcaccel.slurm.states import (
    AccountingEntry,
    Association,
    JobInfo,
    JobState,
    PartitionInfo,
    QueueEntry,
    parse_state,
)
from hpcaccel.slurm.waiting import WAITING_FORMAT, StartEstimate, WaitingJob, parse_estimate, parse_waiting

__all__ = ["Slurm"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]

_ADDRESS = re.compile(r"\d+(?:_\d+|\+\d+)?")
_STEP = re.compile(r"\d+|batch|extern|interactive")
_NODE = re.compile(r"[A-Za-z0-9][\w.-]*")
_ASSOCIATION_COLUMNS = (
    "DefaultAccount,Cluster,Account,Partition,DefaultQOS,QOS,MaxJobs,MaxSubmit,MaxWall,MaxTRES,GrpTRES"
)
_QOS_COLUMNS = (
    "Name,Priority,GraceTime,Preempt,PreemptMode,PreemptExemptTime,Flags,MaxWall,MaxTRES,MaxTRESPerNode,MaxTRESPerUser,"
    "MaxJobsPerUser,MaxSubmitJobsPerUser,MinTRES"
)
_SIGNAL = re.compile(r"[A-Z][A-Z0-9]*|\d+")
_LONGEST_LIST = 100_000
"""Bytes of job ids that go into one argument (Linux takes 128 KiB); beyond that all jobs are asked for."""


class Slurm:
    """Slurm's commands as methods.

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
        return self._run is subprocess.run

    def available(self) -> bool:
        """Whether jobs can be submitted from this machine, as far as its PATH tells."""
        return shutil.which("sbatch") is not None

    def version(self) -> str:
        """E.g. ``22.05.8``."""
        words = self._output(["sinfo", "--version"]).split()
        return words[-1] if words else ""

    # -- jobs ------------------------------------------------------------------------------------------------------

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
            SlurmCommandError: the controller did not answer. It may have taken the job all the same.
        """
        command = ["sbatch", "--parsable", *args, str(script), *words]
        base = os.environ if env is None else env
        result = self._start(command, env=submission_environment(base, script=script.read_text(encoding="utf-8")))
        job_id = result.stdout.strip().splitlines()[-1].partition(";")[0] if result.stdout.strip() else ""
        if result.returncode == 0 and job_id.isdigit():
            self._changed()
            return job_id
        if result.returncode == 0 or _is_transient(result.stderr):
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
        if result.returncode == 0 or _is_transient(result.stderr):
            raise SlurmCommandError(command, result.returncode, result.stderr or f"unexpected answer {result.stdout!r}")
        return StartEstimate(refusal=explain(result.stderr, self._partition_names))

    def waiting(self, partitions: Sequence[str]) -> list[WaitingJob]:
        """The pending jobs of all users in these partitions, as far as the site shows them, one line an array.

        Raises:
            SlurmCommandError: the controller did not answer.
        """
        command = ["squeue", "--noheader", "--states=PENDING", f"--format={WAITING_FORMAT}"]
        return parse_waiting(self._output([*command, f"--partition={','.join(partitions)}"]))

    def job(self, job_id: str) -> JobInfo | None:
        """What the controller knows of one job or one array task (``46_0``); None once it has forgotten it."""
        result = self._start(["scontrol", "show", "job", _address(job_id)])
        if result.returncode == 0:
            return output.pick_job(output.jobs(result.stdout), job_id)
        if _is_unknown_job(result.stderr):
            return None
        raise SlurmCommandError(["scontrol", "show", "job", job_id], result.returncode, result.stderr)

    def queue(self, job_ids: Sequence[str] | None = None, *, include_ended: bool = False) -> dict[str, QueueEntry]:
        """Jobs that wait, run or are being ended, by id, array tasks one by one (``46_3``). One squeue for all.

        Args:
            job_ids: these only (an array's plain id stands for all its tasks); None: all jobs of this user.
            include_ended: also what the controller still remembers of jobs that are over (some minutes).
        """
        # All states, sorted here: which names --states knows depends on the version.
        command = ["squeue", "--array", "--noheader", "--states=all", f"--format={output.QUEUE_FORMAT}"]
        wanted = None if job_ids is None else {_address(job_id) for job_id in job_ids}
        if wanted is None:
            command.append("--me")
        elif not wanted:
            return {}
        elif len(listed := ",".join(sorted(wanted))) <= _LONGEST_LIST:
            command.append(f"--jobs={listed}")
        result = self._start(command)
        if result.returncode != 0 and not _is_unknown_job(result.stderr):
            raise SlurmCommandError(command, result.returncode, result.stderr)
        return {
            one: entry
            for one, entry in output.queue_entries(result.stdout).items()
            if (include_ended or not entry.state.is_ended)
            and (wanted is None or one in wanted or one.partition("_")[0] in wanted)
        }

    def jobs_of_script(self, script: Path) -> list[str]:
        """Plain ids of this user's jobs that were submitted with ``script``, oldest first, those that have just ended
        included, as far as the controller remembers them."""
        command = ["squeue", "--me", "--noheader", "--states=all", "--format=%F|%o"]
        lines = (line.partition("|") for line in self._output(command).splitlines())
        return sorted({job_id.strip() for job_id, _, path in lines if path.strip() == str(script)}, key=int)

    def accounting(self, job_ids: Sequence[str]) -> dict[str, AccountingEntry]:
        """The newest record of each job; an array's plain id stands for all its tasks. {} without accounting."""
        if not job_ids:
            return {}
        listed = ",".join(dict.fromkeys(_address(job_id) for job_id in job_ids))
        command = ["sacct", "--allocations", "--duplicates", "--parsable2", "--noheader"]
        command += [f"--format={output.SACCT_FORMAT}", f"--jobs={listed}"]
        if shutil.which("sacct") is None and self._run is subprocess.run:
            return {}
        result = self._start(command)
        if result.returncode == 0:
            return output.accounting_entries(result.stdout)
        if _has_no_accounting(result.stderr):
            return {}
        raise SlurmCommandError(command, result.returncode, result.stderr)

    def step_state(self, job_id: str, step_id: str | int) -> JobState | None:
        """How the accounting calls a step, which it learns some moments late; None where it does not know it."""
        if not _STEP.fullmatch(str(step_id)):
            raise ValueError(f"step {step_id!r}: wanted is e.g. 0")
        command = ["sacct", "--duplicates", "--parsable2", "--noheader", "--format=State"]
        command.append(f"--jobs={_address(job_id)}.{step_id}")
        if shutil.which("sacct") is None and self._run is subprocess.run:
            return None
        result = self._start(command)
        if result.returncode == 0:
            lines = result.stdout.split("\n")
            return next((parse_state(line) for line in reversed(lines) if line.strip()), None)
        if _has_no_accounting(result.stderr):
            return None
        raise SlurmCommandError(command, result.returncode, result.stderr)

    def cancel(self, job_id: str, *, only_pending: bool = False) -> None:
        """Cancel a job, an array or one of its tasks. One that is over, or unknown to Slurm, is no error.

        Args:
            only_pending: leave alone what has started.
        """
        command = ["scancel", *(["--state=PENDING"] if only_pending else []), _address(job_id)]
        result = self._start(command)
        if result.returncode != 0 and not _is_over(result.stderr):
            raise self._refused(command, result)
        self._changed()

    def signal_step(self, job_id: str, step_id: str | int, signal: str) -> bool:
        """Send a signal (``TERM``, ``USR1``) to all processes of a step. False: the step is over."""
        if not _STEP.fullmatch(str(step_id)) or not _SIGNAL.fullmatch(signal):
            raise ValueError(f"step {step_id!r}, signal {signal!r}: wanted are e.g. step 0 and signal 'TERM'")
        command = ["scancel", f"--signal={signal}", f"{_address(job_id)}.{step_id}"]
        result = self._start(command)
        if result.returncode == 0:
            return True
        if _is_over(result.stderr):
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
        command = ["scontrol", "requeue", _address(job_id)]
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
        command = ["scontrol", "update", f"JobId={_address(job_id)}", f"ExcNodeList={hostlist.compress(nodes)}"]
        result = self._start(command)
        if result.returncode != 0:
            raise self._refused(command, result)

    def depend(self, job_id: str, dependency: str) -> None:
        """Have a job that waits in the queue wait for others; one that has started or ended stays as it is.

        Raises:
            SlurmCommandError: Slurm did not answer, or refused.
        """
        command = ["scontrol", "update", f"JobId={_address(job_id)}", f"Dependency={dependency}"]
        result = self._start(command)
        started = re.search(r"no longer pending|is not pending|already|Job has finished", result.stderr, re.IGNORECASE)
        if result.returncode != 0 and not _is_over(result.stderr) and not started:
            raise SlurmCommandError(command, result.returncode, result.stderr)

    def throttle(self, job_id: str, most: int) -> None:
        """Let at most so many tasks of an array run at a time; those that run already go on. 0: as many as fit.

        Raises:
            SlurmCommandError: the array is over.
        """
        command = ["scontrol", "update", f"JobId={_address(job_id)}", f"ArrayTaskThrottle={most}"]
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
        return ["srun", f"--jobid={_address(job_id)}", "--overlap", *one_task, *(["--pty"] if terminal else []), "bash"]

    # -- the cluster -----------------------------------------------------------------------------------------------

    def partitions(self) -> list[PartitionInfo]:
        """All partitions that this user may see."""
        return output.partitions(
            self._output(["sinfo", "--exact", "--noheader", f"--format={output.PARTITION_FORMAT}"])
        )

    def failed_nodes(self, nodes: Sequence[str]) -> list[str]:
        """Those of ``nodes`` that are down or do not answer."""
        command = ["sinfo", "--exact", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T"]
        return output.failed_nodes(self._output(command))

    def associations(self, user: str) -> list[Association]:
        """The accounts that a user may charge; [] where there is no accounting."""
        if not re.fullmatch(r"[\w.@+-]+", user):
            raise ValueError(f"user {user!r} is no user name")
        command = ["sacctmgr", "--parsable2", "--noheader", "--readonly", "show", "user"]
        command += ["where", f"name={user}", "withassoc", f"format={output.ASSOCIATION_FORMAT}"]
        if shutil.which("sacctmgr") is None and getattr(self._run, "func", self._run) is subprocess.run:
            return []
        result = self._start(command)
        if result.returncode == 0:
            return output.associations(result.stdout)
        if _has_no_accounting(result.stderr):
            return []
        raise SlurmCommandError(command, result.returncode, result.stderr)

    def config(self) -> dict[str, str]:
        """Slurm's configuration, e.g. ``config()["KillWait"] == "30 sec"``."""
        return output.config_values(self._output(["scontrol", "show", "config"]))

    def partition_records(self) -> list[dict[str, str]]:
        """``scontrol show partition``: every partition that this user may see, with Slurm's own keys."""
        return site_output.records(self._output(["scontrol", "--oneliner", "show", "partition"]), "PartitionName")

    def node_records(self) -> list[dict[str, str]]:
        """``scontrol show node``: every node that this user may see, with Slurm's own keys."""
        return site_output.records(self._output(["scontrol", "--oneliner", "show", "node"]), "NodeName")

    def association_table(self, user: str) -> list[dict[str, str]] | None:
        """The user's associations with their limits, by sacctmgr's column names; None where there is no accounting."""
        if not re.fullmatch(r"[\w.@+-]+", user):
            raise ValueError(f"user {user!r} is no user name")
        where = ["user", "where", f"name={user}", "withassoc"]
        return self._accounts([*where, f"format={_ASSOCIATION_COLUMNS}"])

    def qos_table(self) -> list[dict[str, str]] | None:
        """All QOS with their limits, by sacctmgr's column names; None where there is no accounting."""
        return self._accounts(["qos", f"format={_QOS_COLUMNS}"])

    def has_pyxis(self) -> bool:
        """Whether srun here starts containers by itself."""
        return site_output.knows_containers(self._output(["srun", "--help"]))

    def _accounts(self, what: Sequence[str]) -> list[dict[str, str]] | None:
        command = ["sacctmgr", "--parsable2", "--readonly", "show", *what]
        result = self._start(command)
        if result.returncode == 0:
            return site_output.table(result.stdout)
        if _has_no_accounting(result.stderr):
            return None
        raise SlurmCommandError(command, result.returncode, result.stderr)

    # -- starting commands -----------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Not for requeue: that kills its caller, who has little time left, and the run's ledger tells of it."""
        if self.is_here:
            note_change()

    def _partition_names(self) -> list[str]:
        return [partition.name for partition in self.partitions()]

    def _refused(self, command: Sequence[str], result: subprocess.CompletedProcess[str]) -> Exception:
        if re.search(r"access/permission denied|presently disabled", result.stderr, re.IGNORECASE):
            return ClusterError(f"Slurm refused `{' '.join(command)}`: {result.stderr.strip()}")
        return SlurmCommandError(command, result.returncode, result.stderr)

    def _output(self, command: list[str]) -> str:
        result = self._start(command)
        if result.returncode != 0:
            raise SlurmCommandError(command, result.returncode, result.stderr)
        return result.stdout

    def _start(self, command: list[str], *, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        try:
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


def _address(job_id: str) -> str:
    if not _ADDRESS.fullmatch(job_id):
        raise ValueError(f"job id {job_id!r}: wanted is a number, or <array>_<task> such as 46_3")
    return job_id


def _is_unknown_job(stderr: str) -> bool:
    return "Invalid job id" in stderr or "Invalid job array specification" in stderr


def _is_over(stderr: str) -> bool:
    return _is_unknown_job(stderr) or "already completing or completed" in stderr


def _is_transient(stderr: str) -> bool:
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


def _has_no_accounting(stderr: str) -> bool:
    return "accounting storage is disabled" in stderr or "not running a supported accounting_storage" in stderr
