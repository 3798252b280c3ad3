"""``workers/<i>/job.json``: what a worker's host was told by the scheduler, for the supervisors of its trials.

They need the job's times at each start of a trial, and would else ask for themselves, hundreds of times a minute in a
sweep of short trials.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from hpcaccel.core.records import from_dict
from hpcaccel.core.run_dir import read_json, write_json
from hpcaccel.node.allocation import Situation
from hpcaccel.node.stop_sequence import ASK_SELDOM_SECONDS, Told

__all__ = ["KILL_WAIT", "WORKER_JOB", "read_answer", "write_answer"]

WORKER_JOB = "HPCACCEL_WORKER_JOB"
"""Variable: the file's path, for a trial's supervisor."""
KILL_WAIT = "HPCACCEL_KILL_WAIT"
"""Variable: the cluster's KillWait in seconds, for the same."""
OLDEST_SECONDS = 2 * ASK_SELDOM_SECONDS
"""The host asks more often: an older answer is of one that cannot ask."""


def write_answer(path: Path, situation: Situation, *, asked: float) -> None:
    """Only what is true for all trials at any time: a job that runs, and is not being taken away.

    A scheduler that does not answer takes nothing back: else every trial would ask it by itself.
    """
    if not situation.known:
        return
    if situation.running and not situation.preempted:
        write_json(path, {"asked": asked, **dataclasses.asdict(situation)}, sync=False)
    else:
        path.unlink(missing_ok=True)


def read_answer(path: Path) -> Told | None:
    value = read_json(path)
    if value is None or time.time() - value["asked"] > OLDEST_SECONDS:
        return None
    situation = dataclasses.replace(from_dict(Situation, value), failed_nodes=tuple(value["failed_nodes"]))
    return Told(situation=situation, asked=value["asked"])
