"""Questions about jobs: the queue, the controller, the accounting. Nothing here changes anything."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hpcaccel.errors import SlurmCommandError
from hpcaccel.slurm import parsing
from hpcaccel.slurm.programs import Programs, address, is_unknown_job
from hpcaccel.slurm.start_estimates import WAITING_FORMAT, WaitingJob, parse_waiting
from hpcaccel.slurm.states import AccountingEntry, JobInfo, JobState, QueueEntry, parse_state

__all__ = ["STEP", "JobQuestions", "is_script"]

STEP = re.compile(r"\d+|batch|extern|interactive")
"""What a step may be called."""
_LONGEST_LIST = 100_000
"""Bytes of job ids that go into one argument (Linux takes 128 KiB); beyond that all jobs are asked for."""


class JobQuestions(Programs):
    """What Slurm knows of jobs."""

    def job(self, job_id: str) -> JobInfo | None:
        """What the controller knows of one job or one array task (``46_0``); None once it has forgotten it."""
        result = self._start(["scontrol", "show", "job", address(job_id)])
        if result.returncode == 0:
            return parsing.pick_job(parsing.jobs(result.stdout), job_id)
        if is_unknown_job(result.stderr):
            return None
        raise SlurmCommandError(["scontrol", "show", "job", job_id], result.returncode, result.stderr)

    def queue(self, job_ids: Sequence[str] | None = None, *, include_ended: bool = False) -> dict[str, QueueEntry]:
        """Jobs that wait, run or are being ended, by id, array tasks one by one (``46_3``). One squeue for all.

        Args:
            job_ids: these only (an array's plain id stands for all its tasks); None: all jobs of this user.
            include_ended: also what the controller still remembers of jobs that are over (some minutes).
        """
        # All states, sorted here: which names --states knows depends on the version.
        command = ["squeue", "--array", "--noheader", "--states=all", f"--format={parsing.QUEUE_FORMAT}"]
        wanted = None if job_ids is None else {address(job_id) for job_id in job_ids}
        if wanted is None:
            command.append("--me")
        elif not wanted:
            return {}
        elif len(listed := ",".join(sorted(wanted))) <= _LONGEST_LIST:
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
        """Plain ids of this user's jobs that were submitted with ``script``, oldest first, those that have just ended
        included, as far as the controller remembers them."""
        command = ["squeue", "--me", "--noheader", "--states=all", "--format=%F|%i|%o"]
        lines = (line.split("|", 2) for line in self._output(command).splitlines())
        # Each component of a heterogeneous job has a number of its own: the job's is that of the first, 18+0.
        found = {
            job_id.strip()
            for job_id, one, path in lines
            if one.strip().partition("+")[2] in ("", "0") and is_script(path.strip(), script)
        }
        return sorted(found, key=int)

    def workers_of_script(self, script: Path) -> dict[int, str]:
        """The same of a sweep's script: the tasks by the workers that they are. ``%o`` ends with the script's argument,
        which is the worker that the array's task 0 would be."""
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
        """The pending jobs of all users in these partitions, as far as the site shows them, one line an array.

        Raises:
            SlurmCommandError: the controller did not answer.
        """
        command = ["squeue", "--noheader", "--states=PENDING", f"--format={WAITING_FORMAT}"]
        return parse_waiting(self._output([*command, f"--partition={','.join(partitions)}"]))

    def accounting(self, job_ids: Sequence[str]) -> dict[str, AccountingEntry]:
        """The newest record of each job; an array's plain id stands for all its tasks. {} without accounting."""
        if not job_ids:
            return {}
        listed = ",".join(dict.fromkeys(address(job_id) for job_id in job_ids))
        said = self._sacct("--allocations", f"--format={parsing.SACCT_FORMAT}", f"--jobs={listed}")
        return {} if said is None else parsing.accounting_entries(said)

    def step_state(self, job_id: str, step_id: str | int) -> JobState | None:
        """How the accounting calls a step, which it learns some moments late; None where it does not know it."""
        if not STEP.fullmatch(str(step_id)):
            raise ValueError(f"step {step_id!r}: wanted is e.g. 0")
        said = self._sacct("--format=State", f"--jobs={address(job_id)}.{step_id}")
        lines = [line for line in (said or "").split("\n") if line.strip()]
        return parse_state(lines[-1]) if lines else None  # of a job that was requeued the newest record counts

    def _sacct(self, *args: str) -> str | None:
        if self._lacks("sacct"):
            return None
        return self._recorded(["sacct", "--duplicates", "--parsable2", "--noheader", *args])


def is_script(path: str, script: Path) -> bool:
    """Whether ``path``, as Slurm tells it, is ``script``, which may be named through other symbolic links."""
    if path == str(script):
        return True
    return os.path.basename(path) == script.name and os.path.realpath(path) == os.path.realpath(script)


def _number(job_id: str) -> int:
    return int(job_id.partition("_")[0] or 0)
