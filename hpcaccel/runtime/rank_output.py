"""Output of forked ranks in a notebook: pipes from each rank, which a thread copies to this process's own streams.

A notebook shows what its kernel writes to ``sys.stdout`` and ``sys.stderr``, which are objects of the kernel without
file descriptors of their own. A forked rank has copies of these objects, but not the thread that sends their contents.
"""

from __future__ import annotations

import codecs
import io
import os
import selectors
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from string import Template
from typing import Any, TextIO

__all__ = ["RankOutput", "rank_output"]

DRAIN_SECONDS = 1.0
"""How long the end of a launch waits for output of processes that the ranks have started and left running."""
_NAMES = ("stdout", "stderr")
_READ_BYTES = 1 << 16


@contextmanager
def rank_output(ranks: int, prefix: str | None) -> Iterator[RankOutput | None]:
    """Copy the output of ``ranks`` forked ranks to this process's streams. Yields None if they write there directly.

    Args:
        prefix: template of the text before each line, with ``${role_name}``, ``${rank}``, ``${local_rank}``.
    """
    for name in _NAMES:
        getattr(sys, name).flush()  # otherwise each rank has a copy of what is buffered
    if prefix is None and all(_is_descriptor(getattr(sys, name), number) for number, name in enumerate(_NAMES, 1)):
        yield None
        return
    output = RankOutput(ranks, prefix)
    try:
        yield output
    finally:
        output.finish()


def _is_descriptor(stream: Any, number: int) -> bool:
    """Whether ``stream`` is a file that writes to the descriptor ``number``, as in a program outside of a notebook."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    except OSError:  # a buffer in memory
        return False


@dataclass
class _Source:
    """The reading end of a pipe."""

    local_rank: int
    stream: TextIO
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    started: str = ""
    """The beginning of a line that has no end yet. Used only with a prefix."""
    is_broken: bool = False
    """Whether the stream accepts no more output, so that it is read and dropped."""


class RankOutput:
    """Pipes of all ranks, opened before the ranks are forked. See :func:`rank_output`."""

    def __init__(self, ranks: int, prefix: str | None) -> None:
        self._prefix = None if prefix is None else Template(prefix)
        self._numbers = RawArray("i", ranks)
        """Each rank's number among the ranks of all nodes, written by the rank itself, by local rank."""
        self._pipes = {(name, rank): os.pipe() for name in _NAMES for rank in range(ranks)}
        self._selector = selectors.DefaultSelector()
        for (name, rank), (reading, _) in self._pipes.items():
            self._selector.register(reading, selectors.EVENT_READ, _Source(rank, getattr(sys, name)))
        self._thread = threading.Thread(target=self._copy, name="hpcaccel-rank-output", daemon=True)
        self._thread.start()

    def connect_rank(self) -> None:
        """In a forked rank: write to the rank's pipes from now on."""
        local_rank = int(os.environ["LOCAL_RANK"])
        self._numbers[local_rank] = int(os.environ["RANK"])
        for number, name in enumerate(_NAMES, 1):
            os.dup2(self._pipes[name, local_rank][1], number)
            raw = io.FileIO(number, "w", closefd=False)
            stream = io.TextIOWrapper(
                io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
            )
            _redirect(getattr(sys, name), stream)
            setattr(sys, name, stream)
        for ends in self._pipes.values():
            for end in ends:
                os.close(end)

    def finish(self) -> None:
        """Copy what is left, for at most ``DRAIN_SECONDS``. Processes that the ranks leave behind may still be
        writing."""
        for _, writing in self._pipes.values():
            os.close(writing)
        self._thread.join(DRAIN_SECONDS)

    def _copy(self) -> None:
        with self._selector:
            while self._selector.get_map():
                for key, _ in self._selector.select():
                    data = os.read(key.fd, _READ_BYTES)
                    self._write(key.data, key.data.decoder.decode(data, final=not data), is_end=not data)
                    if not data:
                        self._selector.unregister(key.fd)
                        os.close(key.fd)

    def _write(self, source: _Source, text: str, *, is_end: bool) -> None:
        if self._prefix is not None:
            *lines, source.started = f"{source.started}{text}".split("\n")
            if is_end and source.started:
                lines, source.started = [*lines, source.started], ""
            rank = self._numbers[source.local_rank]
            before = self._prefix.safe_substitute(role_name="default", rank=rank, local_rank=source.local_rank)
            text = "".join(f"{before}{line}\n" for line in lines)
        if text and not source.is_broken:
            try:
                source.stream.write(text)
                source.stream.flush()
            except UnicodeEncodeError:
                source.stream.write(text.encode("ascii", "backslashreplace").decode())
            except (OSError, ValueError):
                # The stream has been closed. Ranks whose output is not read would hang once their pipe is full.
                source.is_broken = True


def _redirect(old: Any, new: TextIO) -> None:
    """Make ``old``, to which log handlers may have references, write to ``new``. A file on the same descriptor does so
    anyway."""
    if not isinstance(old, io.TextIOWrapper):
        old.write, old.flush = new.write, new.flush
