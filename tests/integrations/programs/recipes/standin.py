"""What the stand-ins share: a strict parser, ranks that meet without torch, SIGTERM as a flag, the time of a step."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
FIRST = os.environ.get("HPCACCEL_ATTEMPT", "1") == "1"
SLOW_SECONDS = 0.1
"""Duration of a step in the first attempt, which the test stops. Later attempts take no time."""


def say(*words: object) -> None:
    if RANK == 0:
        print(*words, flush=True)


def options(*flags: str, numbers: Sequence[str] = (), switches: Sequence[str] = ()) -> argparse.Namespace:
    """Parse the command line. Each argument must be one of these, written in full; ``flags`` take a text."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in flags:
        parser.add_argument(flag)
    for flag in numbers:
        parser.add_argument(flag, type=float if flag == "--lr" else int)
    for flag in switches:
        parser.add_argument(flag, action="store_true")
    found = parser.parse_args()
    say("argv", json.dumps(sys.argv[1:]))
    return found


def record(file: Path, text: str) -> None:
    """Write the file that names the newest complete checkpoint.

    Megatron, verl and DeepSpeed truncate it first. With ten saves a second a test would meet that moment now and then.
    """
    fresh = file.with_name(f".{file.name}")
    fresh.write_text(text)
    fresh.replace(file)


def pause() -> None:
    """The time that a step takes."""
    time.sleep(SLOW_SECONDS if FIRST else 0)


class Terminated:
    """A flag that is set by SIGTERM."""

    def __init__(self) -> None:
        self.received = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: object) -> None:
        self.received = True


class Ranks:
    """The ranks of the job, connected to rank 0 at MASTER_ADDR and MASTER_PORT."""

    def __init__(self) -> None:
        self._others: list[Connection] = []
        if WORLD_SIZE == 1:
            return
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if RANK == 0:
            with Listener(place, backlog=WORLD_SIZE) as listener:
                self._others = [listener.accept() for _ in range(WORLD_SIZE - 1)]
        else:
            self._others = [_connected(place)]

    def gather(self, value: Any = None) -> list[Any]:
        """The values of all ranks, in any order. No rank returns before all have called it."""
        if RANK > 0:
            self._others[0].send(value)
            values: list[Any] = self._others[0].recv()
            return values
        values = [value, *(other.recv() for other in self._others)]
        for other in self._others:
            other.send(values)
        return values


def _connected(place: tuple[str, int]) -> Connection:
    end = time.monotonic() + 60
    while True:
        try:
            return Client(place)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
