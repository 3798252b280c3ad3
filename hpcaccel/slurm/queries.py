"""Read-only queries for jobs (in queue, controller and accounting), partitions, nodes, configuration and accounts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hpcaccel.errors import SlurmCommandError
from hpcaccel.slurm import parsing, site_parsing
from hpcaccel.slurm.error_messages import is_unknown_job
from hpcaccel.slurm.parsing import WAITING_FORMAT, WaitingJob, parse_waiting
from hpcaccel.slurm.programs import Programs, address
from hpcaccel.slurm.site_parsing import has_pyxis
from hpcaccel.slurm.states import (
    AccountingEntry,
    Association,
    JobInfo,
    JobState,
    PartitionInfo,
    QueueEntry,
    parse_state,
)

__all__ = ["STEP", "Queries", "is_script"]

STEP = re.compile(r"\d+|batch|extern|interactive")
"""Valid step ids."""
_MAX_LIST_BYTES = 100_000
"""Maximum size in bytes of the job ids in one argument (Linux allows 128 KiB). For more ids, squeue lists all jobs."""
_ASSOCIATION_COLUMNS = (
    "DefaultAccount,Cluster,Account,Partition,DefaultQOS,QOS,MaxJobs,MaxSubmit,MaxWall,MaxTRES,GrpTRES"
)
_QOS_COLUMNS = (
    "Name,Priority,GraceTime,Preempt,PreemptMode,PreemptExemptTime,Flags,MaxWall,MaxTRES,MaxTRESPerNode,MaxTRESPerUser,"
    "MaxJobsPerUser,MaxSubmitJobsPerUser,MinTRES"
)


class Queries(Programs):
    """Slurm's read-only commands as methods.

    The methods raise SlurmCommandError if Slurm's program fails, and ClusterError if it is not installed.
    """

    # -- jobs -----------------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> JobInfo | None:
        """One job or array task (``46_0``) from the controller; None once the controller has purged it."""
        result = self._start(["scontrol", "show", "job", address(job_id)])
        if result.returncode == 0:
            return parsing.pick_job(parsing.jobs(result.stdout), job_id)
        if is_unknown_job(result.stderr):
            return None
        raise SlurmCommandError(["scontrol", "show", "job", job_id], result.returncode, result.stderr)

    def queue(self, job_ids: Sequence[str] | None = None, *, include_ended: bool = False) -> dict[str, QueueEntry]:
        """Pending, running and ending jobs by id, with one entry per array task (``46_3``), from a single squeue.

        Args:
            job_ids: return only these jobs (an array's id stands for all its tasks); None returns all of this user's.
            include_ended: include ended jobs that the controller still has (for some minutes).
        """
        # Query all states and filter below: the names that --states accepts depend on the version.
        command = ["squeue", "--array", "--noheader", "--states=all", f"--format={parsing.QUEUE_FORMAT}"]
        wanted = None if job_ids is None else {address(job_id) for job_id in job_ids}
        if wanted is None:
            command.append("--me")
        elif not wanted:
            return {}
        elif len(listed := ",".join(sorted(wanted))) <= _MAX_LIST_BYTES:
            command.append(f"--jobs={listed}")
        result = self._start(command)
        if result.returncode != 0 and not is_unknown_job(result.stderr):
            raise SlurmCommandError(command, result.returncode, result.stderr)
        return {
            one: entry
            for one, entry in parsing.queue_entries(result.stdout).items()
            if (include_ended or not entry.state.is_ended)
            and (wanted is None or one in wanted or one.partition("_")[0] in wanted)
        }

    def jobs_of_script(self, script: Path) -> list[str]:
        """Ids of this user's jobs that were submitted with ``script``, oldest first; an array has one id.

        Ended jobs are included until the controller purges them.
        """
        command = ["squeue", "--me", "--noheader", "--states=all", "--format=%F|%i|%o"]
        lines = (line.split("|", 2) for line in self._output(command).splitlines())
        # Each component of a heterogeneous job has its own id. The id of the first one, 18+0, is the job's id.
        found = {
            job_id.strip()
            for job_id, one, path in lines
            if one.strip().partition("+")[2] in ("", "0") and is_script(path.strip(), script)
        }
        return sorted(found, key=int)

    def workers_of_script(self, script: Path) -> dict[int, str]:
        """The newest array task (``46_3``) of each worker of a sweep's script, by worker index.

        squeue's ``%o`` is the script's path and its argument, if it has one: the worker index of the array's task 0
        (default: 0).
        """
        command = ["squeue", "--me", "--array", "--noheader", "--states=all", "--format=%F|%K|%o"]
        found: dict[int, str] = {}
        for line in self._output(command).splitlines():
            job_id, task, called = (part.strip() for part in line.split("|", 2))
            path, offset = called, "0"
            if not is_script(path, script):
                path, _, offset = called.rpartition(" ")
            if task.isdecimal() and offset.isdecimal() and is_script(path, script):
                index = int(offset) + int(task)
                found[index] = max(found.get(index, ""), f"{job_id}_{task}", key=_number)
        return found

    def waiting(self, partitions: Sequence[str]) -> list[WaitingJob]:
        """Pending jobs of all users in these partitions, if the site shows them; an array is one entry."""
        command = ["squeue", "--noheader", "--states=PENDING", f"--format={WAITING_FORMAT}"]
        return parse_waiting(self._output([*command, f"--partition={','.join(partitions)}"]))

    def accounting(self, job_ids: Sequence[str]) -> dict[str, AccountingEntry]:
        """The newest record of each job; an array's id stands for all its tasks. Empty if there is no accounting."""
        if not job_ids:
            return {}
        listed = ",".join(dict.fromkeys(address(job_id) for job_id in job_ids))
        output = self._sacct("--allocations", f"--format={parsing.SACCT_FORMAT}", f"--jobs={listed}")
        return {} if output is None else parsing.accounting_entries(output)

    def step_state(self, job_id: str, step_id: str | int) -> JobState | None:
        """State of a step in the accounting, which lags by some seconds; None if it has no such step or is disabled."""
        if not STEP.fullmatch(str(step_id)):
            raise ValueError(f"{step_id!r} is not a step ID: use a number such as 0, or batch, extern, interactive")
        output = self._sacct("--format=State", f"--jobs={address(job_id)}.{step_id}")
        lines = [line for line in (output or "").split("\n") if line.strip()]
        return parse_state(lines[-1]) if lines else None  # a requeued job has several records; the newest counts

    def step_named(self, job_id: str, name: str) -> str | None:
        """The id of a job's running step with this name, such as ``0``; None if there is none."""
        output = self._output(["squeue", "--steps", "--noheader", "--format=%i|%j", f"--jobs={address(job_id)}"])
        found = (line.strip().partition("|") for line in output.splitlines())
        return next((step.rpartition(".")[2] for step, _, shown in found if shown == name), None)

    def job_record(self, job_id: str) -> dict[str, str]:
        """A job's record from ``scontrol show job``, with Slurm's keys; empty once the controller has purged it."""
        output = self._output(["scontrol", "--oneliner", "show", "job", address(job_id)])
        return next(iter(site_parsing.records(output, "JobId")), {})

    def _sacct(self, *args: str) -> str | None:
        if self._lacks("sacct"):
            return None
        return self._accounting_output(["sacct", "--duplicates", "--parsable2", "--noheader", *args])

    # -- the cluster ----------------------------------------------------------------------------------------------

    def version(self) -> str:
        """Slurm's version, e.g. ``22.05.8``."""
        words = self._output(["sinfo", "--version"]).split()
        return words[-1] if words else ""

    def config(self) -> dict[str, str]:
        """Slurm's configuration, e.g. ``config()["KillWait"] == "30 sec"``."""
        return site_parsing.config_values(self._output(["scontrol", "show", "config"]))

    def partitions(self) -> list[PartitionInfo]:
        """All partitions visible to this user."""
        return site_parsing.partitions(
            self._output(["sinfo", "--exact", "--noheader", f"--format={site_parsing.PARTITION_FORMAT}"])
        )

    def failed_nodes(self, nodes: Sequence[str]) -> list[str]:
        """The nodes among ``nodes`` that are down, failing or not responding."""
        command = ["sinfo", "--exact", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T"]
        return site_parsing.failed_nodes(self._output(command))

    def partition_records(self) -> list[dict[str, str]]:
        """Every partition visible to this user, from ``scontrol show partition``, with Slurm's keys."""
        return site_parsing.records(self._output(["scontrol", "--oneliner", "show", "partition"]), "PartitionName")

    def node_records(self) -> list[dict[str, str]]:
        """Every node visible to this user, from ``scontrol show node``, with Slurm's keys."""
        return site_parsing.records(self._output(["scontrol", "--oneliner", "show", "node"]), "NodeName")

    def associations(self, user: str) -> list[Association]:
        """The accounts that a user may charge; empty if the cluster has no accounting."""
        what = [*_of_user(user), f"format={site_parsing.ASSOCIATION_FORMAT}"]
        output = None if self._lacks("sacctmgr") else self._sacctmgr(*what, options=["--noheader"])
        return [] if output is None else site_parsing.associations(output)

    def association_table(self, user: str) -> list[dict[str, str]] | None:
        """The user's associations with their limits, by sacctmgr's column names; None if there is no accounting."""
        return self._table(*_of_user(user), f"format={_ASSOCIATION_COLUMNS}")

    def qos_table(self) -> list[dict[str, str]] | None:
        """All QOS with their limits, by sacctmgr's column names; None if there is no accounting."""
        return self._table("qos", f"format={_QOS_COLUMNS}")

    def has_pyxis(self) -> bool:
        """Whether srun can start containers itself, with the plugin pyxis."""
        return has_pyxis(self._output(["srun", "--help"]))

    def _table(self, *what: str) -> list[dict[str, str]] | None:
        output = self._sacctmgr(*what)
        return None if output is None else site_parsing.table(output)

    def _sacctmgr(self, *what: str, options: Sequence[str] = ()) -> str | None:
        return self._accounting_output(["sacctmgr", "--parsable2", *options, "--readonly", "show", *what])


def is_script(path: str, script: Path) -> bool:
    """Whether ``path``, as Slurm prints it, is the file ``script``, possibly through other symbolic links."""
    if path == str(script):
        return True
    return os.path.basename(path) == script.name and os.path.realpath(path) == os.path.realpath(script)


def _number(job_id: str) -> int:
    return int(job_id.partition("_")[0] or 0)


def _of_user(user: str) -> list[str]:
    if not re.fullmatch(r"[\w.@+-]+", user):
        raise ValueError(f"{user!r} is not a user name")
    return ["user", "where", f"name={user}", "withassoc"]
