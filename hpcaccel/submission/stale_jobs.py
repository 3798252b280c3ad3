"""Jobs that Slurm has in its queue although their run has ended: held after a requeue, or about to start once more.

A start of such a job does nothing: its supervisor finds the end in the ledger. But one that is held waits for ever.
"""

from __future__ import annotations

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import HpcaccelError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.states import QueueEntry
from hpcaccel.submission.run_state import read_record

__all__ = ["left_in_queue", "sentence_on"]


def left_in_queue(run: RunDir, slurm: Slurm) -> list[QueueEntry]:
    """The jobs of an ended run that wait in the queue, by one question to Slurm; none where it does not answer."""
    record = read_record(run)
    if record.backend != "slurm" or not record.job_ids:
        return []
    try:
        queued = slurm.queue(record.job_ids)
    except HpcaccelError:
        return []  # nobody can say, and nobody could take them out either
    return [entry for entry in queued.values() if entry.state.is_pending]


def sentence_on(entry: QueueEntry) -> str:
    how = "held" if entry.is_held else entry.state.value.lower()
    return f"job {entry.job_id} is still in the queue ({how}{f', {entry.reason}' if entry.reason else ''})"
