"""The process that writes a rank's file while the rank trains on.

It lives as long as its rank, and shares with it the memory that a snapshot is taken to. A job comes as a line of JSON
on the standard input; what comes of it goes back as lines: ``written`` when this rank's file is on the disk,
``committed`` when rank 0's writer has renamed the checkpoint, ``failed`` with the reason. It imports no torch, so that
it starts in a moment and holds little memory, and takes no lock of the interpreter that trains.

It does not outlive its rank: a save of an attempt that is over must not appear while the next attempt looks what there
is. When its input ends, or it has another parent, it leaves at once, in the middle of whatever it does. What was not
renamed by then never counts. Signals that stop a training are not for it: the rank decides, and waits for it.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any

from hpcaccel.checkpoint import commit, writer_commit
from hpcaccel.checkpoint.crc import crc32
from hpcaccel.checkpoint.writer_files import ShardFile, up_to_block, why_not_written

__all__ = ["main"]

LOOK_SECONDS = 1.0
"""How often to look whether the rank still lives, where a process forked by it holds the pipe open."""
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(arguments: list[str]) -> None:
    """Serve until the rank has gone. The arguments: descriptor and size of the shared memory, the rank's process id."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    descriptor, size, parent = map(int, arguments)
    memory = memoryview(mmap.mmap(descriptor, size))
    jobs: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
    threading.Thread(target=_work, args=(jobs, memory, parent), daemon=True).start()
    _listen(jobs, parent)
    os._exit(0)


def _listen(jobs: queue.SimpleQueue[tuple[dict[str, Any], bytes]], parent: int) -> None:
    """Hand jobs on; return when there will be no more."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    received = b""
    while True:
        while not poll.poll(1000 * LOOK_SECONDS):
            if os.getppid() != parent:
                return
        piece = os.read(0, 1 << 20)  # nothing may stay in a buffer that poll does not see
        if not piece:
            return
        received += piece
        while (taken := _taken(received)) is not None:
            job, index, received = taken
            jobs.put((job, index))


def _taken(received: bytes) -> tuple[dict[str, Any], bytes, bytes] | None:
    """The first job in ``received``, the index that follows its line, and the rest; None where it is not there yet."""
    line, newline, rest = received.partition(b"\n")
    if not newline:
        return None
    job: dict[str, Any] = json.loads(line)
    size = job["index_bytes"]
    return None if len(rest) < size else (job, rest[:size], rest[size:])


def _work(jobs: queue.SimpleQueue[tuple[dict[str, Any], bytes]], memory: memoryview, parent: int) -> None:
    while True:
        job, index = jobs.get()
        try:
            _write(job, memory)
            _say({"written": True})
            if index:
                _commit(job, index, parent)
        except BaseException as error:  # the rank must hear of it, whatever it is
            _say({"failed": _in_words(error), "ours": not isinstance(error, OSError)})


def _write(job: dict[str, Any], memory: memoryview) -> None:
    """This rank's file, its CRCs reckoned meanwhile."""
    lengths: list[int] = job["lengths"]
    crcs: list[int] = []
    if lengths:
        path = Path(job["temporary"]) / job["file"]
        reckoning = threading.Thread(target=_reckon, args=(memory, lengths, crcs))
        reckoning.start()
        file = ShardFile(path)
        try:
            file.write(memory[: up_to_block(sum(lengths))], 0)
            file.finish(sum(lengths))
        except OSError as error:
            said = why_not_written(error, path.parent, sum(lengths))
            raise OSError(error.errno, said, str(path)) from None
        finally:
            file.close()
            reckoning.join()
        writer_commit.deliver(Path(job["results"]), job["file"], crcs=crcs, lengths=lengths)


def _reckon(memory: memoryview, lengths: list[int], crcs: list[int]) -> None:
    offset = 0
    for length in lengths:
        crcs.append(crc32(memory[offset : offset + length]))
        offset += length


def _commit(job: dict[str, Any], index: bytes, parent: int) -> None:
    def go_on() -> None:
        if os.getppid() != parent:
            os._exit(0)

    told = writer_commit.gathered(Path(job["results"]), job["files"], go_on)
    go_on()
    size = writer_commit.publish(
        told,
        temporary=Path(job["temporary"]),
        final=Path(job["final"]),
        results=Path(job["results"]),
        index=index,
        facts=job["facts"],
    )
    committed = time.monotonic()
    if job["prune"] is not None:
        commit.prune(Path(job["final"]).parent, **job["prune"])
    _say({"committed": committed, "bytes": size})


def _in_words(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'the file'}: {error.strerror or error}"
    return f"{type(error).__name__}: {error}"


def _say(word: dict[str, Any]) -> None:
    os.write(1, json.dumps(word).encode() + b"\n")
