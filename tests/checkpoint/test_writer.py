"""The process that writes a rank's background saves."""

import os
import time
from pathlib import Path

import pytest

from hpcaccel.checkpoint.snapshot_memory import SnapshotMemory
from hpcaccel.checkpoint.writer import WriterProcess


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling policies of Linux")
def test_thread_that_receives_orders_is_a_batch_thread_and_those_that_write_are_not():
    memory = SnapshotMemory(4096)
    writer = WriterProcess(memory.descriptor, memory.size)
    try:
        deadline = time.monotonic() + 60
        while (policies := policies_of(writer._process.pid)) != (os.SCHED_BATCH, {os.SCHED_OTHER}):
            assert time.monotonic() < deadline, policies
            time.sleep(0.01)
    finally:
        writer.stop()


def policies_of(process: int) -> tuple[int, set[int]]:
    """The policy of its main thread, and those of its other threads."""
    threads = [int(task.name) for task in Path(f"/proc/{process}/task").iterdir()]
    return os.sched_getscheduler(process), {os.sched_getscheduler(one) for one in threads if one != process}
