"""Latency and bandwidth between each pair of nodes, and the offsets between the nodes' clocks.

The first rank of each node takes part; on a single node, all its ranks. The pairs follow the schedule of a round-robin
tournament, in which each node is in one pair at a time. The lower rank of a pair measures, the other one responds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hpcaccel.runtime.distributed import device_backend
from hpcaccel.runtime.selftest.check_runner import CheckRunner, Fault

__all__ = ["measure_clocks", "measure_pairs", "tournament"]

MOST_ROUNDS = 64
"""With more nodes than this, each node is measured with only this many others."""
PINGS = 30
CLOCK_PINGS = 10
TRIES = 3
"""Messages of each size. The fastest counts, since other programs of the node may slow down some."""
FIRST_BYTES, MOST_BYTES_CPU, MOST_BYTES = 1 << 16, 1 << 24, 1 << 28
"""Sizes of messages; the largest ones, on CPUs and other devices, are the first one times a power of ``GROWTH``."""
LONG_SECONDS = 0.05
"""The size of messages grows until one takes this long."""
GROWTH = 4
END = 0


def tournament(players: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """The rounds of a round-robin tournament: each player meets each other player once, lower number first."""
    circle: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def measure_pairs(runner: CheckRunner, device: torch.device, players: Sequence[int]) -> None:
    """Measure the pairs of this rank with ``players``. The results are in the data of the lower rank of each pair. The
    data of each rank have the ranks whose messages arrived with wrong contents."""
    rank = dist.get_rank()
    links = []
    wrong = []
    for number, pairs in enumerate(tournament(players)):
        if number >= MOST_ROUNDS:
            break
        for pair in pairs:
            if rank in pair:
                other = pair[1] if rank == pair[0] else pair[0]
                runner.step(f"pair with rank {other}")
                link = _Link(device, other)
                if rank == pair[0]:
                    links.append(link.measured())
                else:
                    link.respond()
                if link.is_wrong:
                    wrong.append(other)
                    text = f"a message from rank {other} arrived with wrong contents"
                    runner.report(Fault(kind="wrong_result", message=text, ranks=[]))  # a comparison finds the node
    runner.measure(links=links, wrong=wrong)


class _Link:
    """The connection to the rank ``other``."""

    def __init__(self, device: torch.device, other: int) -> None:
        self._device = device
        self._other = other
        self.is_wrong = False
        """Whether a message from the other rank has arrived with wrong contents."""
        self._word = torch.zeros(1, dtype=torch.int64, device=device)
        self._most = MOST_BYTES_CPU if device.type == "cpu" else MOST_BYTES
        block = torch.arange(FIRST_BYTES, device=device).remainder_(251).to(torch.uint8)
        self._contents = block.repeat(self._most // FIRST_BYTES)

    def measured(self) -> dict[str, object]:
        """Measure the link from here. The other rank must call ``respond``."""
        for _ in range(3):
            self._ping()
        seconds = min(self._ping() for _ in range(PINGS))
        there, back = (self._bandwidth(sends=sends, ping_seconds=seconds) for sends in (True, False))
        self._send(END)
        return {
            "other": self._other,
            "latency_us": round(seconds / 2 * 1e6, 1),
            "mb_per_s_there": round(there / 1e6, 1),
            "mb_per_s_back": round(back / 1e6, 1),
        }

    def respond(self) -> None:
        """Respond to the other rank's requests until ``END``: 1 is a ping, a larger number is the size in bytes of a
        message to receive, a negative number that of a message to send."""
        while (size := self._receive()) != END:
            if size == 1:
                self._send(1)
            elif size > 1:
                message = torch.empty(size, dtype=torch.uint8, device=self._device)
                dist.recv(message, self._other)
                self._send(1)
                self._compare(message)
            else:
                dist.send(self._message(-size), self._other)

    def _bandwidth(self, *, sends: bool, ping_seconds: float) -> float:
        """Bytes per second in one direction."""
        size = FIRST_BYTES
        while True:
            seconds = min(self._transfer(size, sends=sends) for _ in range(TRIES))
            if seconds > LONG_SECONDS or size >= self._most:
                return size / max(seconds - ping_seconds, seconds / 2)
            size *= GROWTH

    def _transfer(self, size: int, *, sends: bool) -> float:
        message = self._message(size) if sends else torch.empty(size, dtype=torch.uint8, device=self._device)
        self._synchronize()
        started = time.perf_counter()
        self._send(size if sends else -size)
        if sends:
            dist.send(message, self._other)
            self._receive()
        else:
            dist.recv(message, self._other)
        self._synchronize()
        seconds = time.perf_counter() - started
        if not sends:
            self._compare(message)
        return seconds

    def _compare(self, received: torch.Tensor) -> None:
        if not torch.equal(received, self._message(received.numel())):
            self.is_wrong = True

    def _message(self, size: int) -> torch.Tensor:
        return self._contents[:size]

    def _ping(self) -> float:
        self._synchronize()
        started = time.perf_counter()
        self._send(1)
        self._receive()
        return time.perf_counter() - started

    def _send(self, number: int) -> None:
        dist.send(self._word.fill_(number), self._other)

    def _receive(self) -> int:
        dist.recv(self._word, self._other)
        return int(self._word.item())

    def _synchronize(self) -> None:
        device_backend.synchronize(self._device)


def measure_clocks(runner: CheckRunner, players: Sequence[int]) -> None:
    """Measure the offsets of the clocks of the first ranks of all nodes from rank 0's, by an exchange of times.

    Rank 0 records, for each rank, the offset at the fastest of several exchanges, and half of its duration, which
    limits the error.
    """
    rank = dist.get_rank()
    word = torch.zeros(1, dtype=torch.float64)
    if rank != players[0]:
        if rank in players:
            for _ in range(CLOCK_PINGS):
                dist.recv(word, players[0])
                dist.send(word.fill_(time.time()), players[0])
        return
    offsets = {}
    for other in players[1:]:
        runner.step(f"clock of rank {other}")
        found = []
        for _ in range(CLOCK_PINGS):
            before, started = time.time(), time.perf_counter()
            dist.send(word, other)
            dist.recv(word, other)
            seconds = time.perf_counter() - started
            found.append((seconds, word.item() - before - seconds / 2))
        seconds, offset = min(found)
        offsets[str(other)] = {"offset_ms": round(offset * 1e3, 3), "error_ms": round(seconds / 2 * 1e3, 3)}
    runner.measure(clocks=offsets)
