"""Collectives with known results, over several types.

Every rank's contribution is a segment of its own (in a sum, the others add zeros), so that a wrong number names the
rank that it came from. All values are integers that every type represents exactly.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hpcaccel.runtime.distributed.device_backend import synchronize
from hpcaccel.runtime.selftest.check_runner import CheckRunner, Fault

__all__ = ["check_collectives"]

SEGMENT = 1024
"""Numbers that each rank contributes."""
TIMED_NUMBERS_CPU, TIMED_NUMBERS = 1 << 20, 1 << 26
"""Size of the timed all-reduce in float32 numbers, on the CPU and on other devices."""
TIMED_ROUNDS = 3
TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8,
)  # fmt: skip


@dataclass
class _Collectives:
    """The collectives of one rank. ``wrong`` has, for each sender, the collectives in which its segment is wrong."""

    device: torch.device
    rank: int = field(default_factory=dist.get_rank)
    world_size: int = field(default_factory=dist.get_world_size)
    wrong: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def segment(self, rank: int, type_: torch.dtype, *, receiver: int = 0) -> torch.Tensor:
        """The contribution of ``rank``, shape ``(SEGMENT,)``, between 1 and 100."""
        numbers = torch.arange(SEGMENT, device=self.device) * 7 + rank * 13 + receiver * 5
        return (numbers % 100 + 1).to(type_)

    def compare(self, what: str, sender: int, found: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(found, expected):
            self.wrong[sender].append(what)

    def _compare_all(self, what: str, found: torch.Tensor, type_: torch.dtype) -> None:
        for sender, part in enumerate(found.view(-1, SEGMENT)):
            self.compare(what, sender, part, self.segment(sender, type_))

    def all_reduce(self, type_: torch.dtype) -> None:
        numbers = torch.zeros(self.world_size * SEGMENT, dtype=type_, device=self.device)
        numbers[self.rank * SEGMENT : (self.rank + 1) * SEGMENT] = self.segment(self.rank, type_)
        dist.all_reduce(numbers)
        self._compare_all(f"all_reduce {_name(type_)}", numbers, type_)

    def all_gather(self, type_: torch.dtype) -> None:
        parts = [torch.empty(SEGMENT, dtype=type_, device=self.device) for _ in range(self.world_size)]
        dist.all_gather(parts, self.segment(self.rank, type_))
        self._compare_all(f"all_gather {_name(type_)}", torch.cat(parts), type_)

    def reduce_scatter(self, type_: torch.dtype) -> None:
        # This rank receives the sum of one part of each rank: again every rank adds to places of its own.
        each = SEGMENT // self.world_size
        if not each:
            return
        parts = torch.zeros(self.world_size, self.world_size * each, dtype=type_, device=self.device)
        own = slice(self.rank * each, (self.rank + 1) * each)
        parts[:, own] = self.segment(self.rank, type_)[:each]
        result = torch.empty(self.world_size * each, dtype=type_, device=self.device)
        # torch 2.13 renames it
        function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        function(result, parts.flatten())
        for sender, part in enumerate(result.view(-1, each)):
            self.compare(f"reduce_scatter {_name(type_)}", sender, part, self.segment(sender, type_)[:each])

    def broadcast(self, type_: torch.dtype) -> None:
        for sender in {0, self.world_size - 1}:
            numbers = self.segment(sender, type_) if self.rank == sender else self.segment(0, type_).zero_()
            dist.broadcast(numbers, src=sender)
            self.compare(f"broadcast {_name(type_)}", sender, numbers, self.segment(sender, type_))

    def all_to_all(self, type_: torch.dtype) -> None:
        sent = torch.cat([self.segment(self.rank, type_, receiver=one) for one in range(self.world_size)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        for sender, part in enumerate(received.view(-1, SEGMENT)):
            self.compare(f"all_to_all {_name(type_)}", sender, part, self.segment(sender, type_, receiver=self.rank))

    def send_to_next(self, type_: torch.dtype) -> None:
        """Send a segment to the next rank, in a ring."""
        sent = self.segment(self.rank, type_)
        received = torch.empty_like(sent)
        before = (self.rank - 1) % self.world_size
        operations = [
            dist.P2POp(dist.isend, sent, (self.rank + 1) % self.world_size),
            dist.P2POp(dist.irecv, received, before),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        self.compare(f"send/recv {_name(type_)}", before, received, self.segment(before, type_))

    def all(self) -> Iterator[Callable[[torch.dtype], None]]:
        yield from (self.all_reduce, self.all_gather, self.reduce_scatter)
        yield from (self.broadcast, self.all_to_all, self.send_to_next)


def check_collectives(runner: CheckRunner, device: torch.device) -> None:
    """Run every collective of the backend with every type, and report wrong results with the rank they came from.

    A combination that the backend refuses (on all ranks, before it sends anything) is recorded as unsupported.
    """
    collectives = _Collectives(device)
    done: list[str] = []
    unsupported: dict[str, str] = {}
    for function in collectives.all():
        runner.step(function.__name__)
        for type_ in TYPES:
            what = f"{function.__name__} {_name(type_)}"
            try:
                function(type_)
                done.append(what)
            except (RuntimeError, NotImplementedError) as error:
                if not _is_refusal(error):
                    raise
                unsupported[what] = str(error).splitlines()[0][:200]
    runner.measure(done=done, unsupported=unsupported, wrong={str(k): v for k, v in collectives.wrong.items()})
    for sender, places in collectives.wrong.items():
        shown = ", ".join(places[:6]) + (f" and {len(places) - 6} more" if len(places) > 6 else "")
        message = f"wrong numbers from rank {sender} arrived at rank {collectives.rank}: {shown}"
        runner.report(Fault(kind="wrong_result", message=message, ranks=()))  # the report compares all ranks
    runner.step("timed all_reduce")  # also after wrong results, which other ranks may not have
    runner.measure(all_reduce=_timed(device, collectives.world_size))


def _name(type_: torch.dtype) -> str:
    return str(type_).removeprefix("torch.")


def _is_refusal(error: Exception) -> bool:
    words = str(error).lower()
    return any(one in words for one in ("not support", "unsupported", "not implement", "invalid scalar type"))


def _timed(device: torch.device, world_size: int) -> dict[str, Any]:
    """The best of a few all-reduces. ``mb_per_s`` is the bus bandwidth: what each rank sends and receives."""
    numbers = torch.ones(TIMED_NUMBERS_CPU if device.type == "cpu" else TIMED_NUMBERS, device=device)
    best = float("inf")
    for _ in range(TIMED_ROUNDS):
        numbers.fill_(1)
        synchronize(device)
        started = time.perf_counter()
        dist.all_reduce(numbers)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    count = numbers.numel() * numbers.element_size()
    return {
        "bytes": count,
        "seconds": round(best, 6),
        "mb_per_s": round(2 * (world_size - 1) / world_size * count / best / 1e6, 1),
    }
