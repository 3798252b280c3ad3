"""Ranks as processes, forked from one that has imported torch, and what each of them sends over its sockets."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Traffic", "in_processes", "with_folder"]

_TCP_INFO_BYTES = 256
_BYTES_ACKED, _DATA_SEGMENTS_OUT = 120, 156
"""Offsets in the struct tcp_info of Linux."""


def in_processes(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Call ``work(rank)`` in a process for each rank, and return the results, which must be JSON values.

    The processes end together: one that ends earlier would break the connections of the others.

    Raises:
        RuntimeError: a process has failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    all_done, end_of_all = os.pipe()
    pipes = []
    for rank in range(ranks):
        reader, writer = os.pipe()
        if not os.fork():
            os.close(end_of_all)
            try:
                result = json.dumps(work(rank))
                with os.fdopen(writer, "w") as pipe:
                    pipe.write(result)
                os.read(all_done, 1)
            except BaseException:
                traceback.print_exc()
            os._exit(0)  # torch's groups of many processes may wait for each other at a normal exit
        os.close(writer)
        pipes.append(reader)
    found = []
    for reader in pipes:
        with os.fdopen(reader) as pipe:
            found.append(pipe.read())
    os.close(end_of_all)
    os.close(all_done)
    for _ in pipes:
        os.wait()
    if "" in found:
        raise RuntimeError(f"rank {found.index('')} of {ranks} failed")
    return [json.loads(each) for each in found]


def with_folder(ranks: int, work: Callable[[int, str], Any]) -> list[Any]:
    """Call ``work(rank, folder)`` in a process for each rank, with a temporary folder that all of them share."""
    with tempfile.TemporaryDirectory() as folder:
        return in_processes(ranks, lambda rank: work(rank, folder))


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes that this process has sent over TCP, as the kernel counts them.

    Small messages are segments of their own, because gloo sets TCP_NODELAY. Bytes count once the peer has acknowledged
    them.
    """

    messages: int
    bytes: int

    @classmethod
    def now(cls) -> Traffic:
        messages = sent = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as one:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            except OSError:  # not a TCP socket, or closed meanwhile
                continue
            sent += struct.unpack_from("Q", info, _BYTES_ACKED)[0]
            messages += struct.unpack_from("I", info, _DATA_SEGMENTS_OUT)[0]
        return cls(messages, sent)
