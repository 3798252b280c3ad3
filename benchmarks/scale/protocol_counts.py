"""Counted requests, messages, bytes and operations of each protocol, beside the model that predicts them at any size.

Processes that run hpcaccel's code are counted (``process_counts``). ``COUNTS`` has the counts of the last
``python -m scale --counts --record``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.checkpoint.rank_blocks import BLOCK
from hpcaccel.runtime.distributed.collectives.exchange import HEADER_WORDS, MESSAGE_WORDS
from hpcaccel.runtime.distributed.rendezvous import KEYS_PER_REQUEST
from scale import process_counts
from scale.message_counts import TREE_WIDTH
from scale.message_models import WORD_BYTES, busiest_of_ring, busiest_of_tree

__all__ = ["COUNTS", "LARGEST", "PROTOCOLS", "CountedProtocol", "load", "measure", "save"]

COUNTS = Path(__file__).with_name("counts.json")
SIZES = (2, 4, 8, 16, 32, 64)
BLOCK_SIZES = (80, 256)
"""Further numbers of ranks of a commit: they form several blocks."""
LARGEST = 16_384
_HEADERS = 2 * HEADER_WORDS
"""Numbers that the ranks reduce to compare their headers."""


@dataclass(frozen=True)
class CountedProtocol:
    """One count of a protocol.

    Args:
        kind: a key of ``process_counts.COUNTERS``.
        grows: with the number of ranks, as text.
        critical: whether the training waits for it.
        model: the count at any number of ranks, as the processes were set up (trees of ``TREE_WIDTH``).
        used: the count at a large number of ranks, as training does it; the model's if None.
    """

    name: str
    kind: str
    grows: str
    critical: bool
    model: Callable[[int], float]
    used: Callable[[int], float] | None = None

    def at(self, ranks: int) -> float:
        return (self.used or self.model)(ranks)

    @property
    def of_kernel(self) -> bool:
        """Whether the kernel counts it. It also counts messages that it sends again."""
        return self.kind in ("agreement", "tree_agreement", "call", "tree_call")


def _ring(what: str, **data: int) -> Callable[[int], float]:
    return lambda ranks: getattr(busiest_of_ring(ranks, **data), what)


def _tree(what: str, *, width: int = TREE_WIDTH, **data: int) -> Callable[[int], float]:
    return lambda ranks: getattr(busiest_of_tree(ranks, width=width, **data), what)


def _depth(ranks: int) -> int:
    """Of the binomial tree: most bits of a rank's number."""
    return max(rank.bit_count() for rank in range(ranks))


def _blocks(ranks: int) -> int:
    return math.ceil(ranks / BLOCK)


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        CountedProtocol(
            "check-in: requests of rank 0", "check_in", "P / 512", True, lambda p: 3 + math.ceil(p / KEYS_PER_REQUEST)
        ),
        CountedProtocol(
            "check-in: requests at the store", "check_in", "P", True, lambda p: 3 * p + math.ceil(p / KEYS_PER_REQUEST)
        ),
        CountedProtocol(
            "group, full mesh: requests at the store", "full_mesh", "P²", True, lambda p: p * (2 * p + 1)
        ),
        CountedProtocol(
            "group, on demand: requests at the store", "on_demand", "P", True, lambda p: p * (1 + 2 * min(p - 1, 2))
        ),
        CountedProtocol(
            "stop agreement, ring: messages", "agreement", "constant", True, _ring("messages", words=1)
        ),
        CountedProtocol("stop agreement, ring: bytes", "agreement", "constant", True, _ring("bytes", words=1)),
        CountedProtocol(
            "stop agreement, tree: messages", "tree_agreement", "log P", True,
            _tree("messages", words=1), _tree("messages", words=1, width=16),
        ),
        CountedProtocol(
            "stop agreement, tree: bytes", "tree_agreement", "log P", True,
            _tree("bytes", words=1), _tree("bytes", words=1, width=16),
        ),
        CountedProtocol(
            "wait_for_everyone, ring: bytes", "call", "P", True, _ring("bytes", row_bytes=MESSAGE_WORDS * WORD_BYTES)
        ),
        CountedProtocol(
            "gather of 8 bytes, ring: bytes", "call", "P", True, _ring("bytes", row_bytes=MESSAGE_WORDS * WORD_BYTES)
        ),
        CountedProtocol(
            "wait_for_everyone, tree: bytes", "tree_call", "log P", True,
            _tree("bytes", words=_HEADERS), _tree("bytes", words=_HEADERS, width=16),
        ),
        CountedProtocol(
            "gather of 8 bytes, tree: bytes", "tree_call", "P", True,
            _tree("bytes", words=_HEADERS, row_bytes=8), _tree("bytes", words=_HEADERS, row_bytes=8, width=16),
        ),
        CountedProtocol(
            "save: messages to rank 0", "save_agreement", "log P", True, lambda p: math.ceil(math.log2(p))
        ),
        CountedProtocol("save: messages in turn", "save_agreement", "log P", True, _depth),
        CountedProtocol(
            "save: equal answers at rank 0", "save_agreement", "log P", True, lambda p: math.ceil(math.log2(p))
        ),
        CountedProtocol(
            "commit: operations of a writer", "commit", "constant", False, lambda p: 5 if p <= BLOCK else 13
        ),
        CountedProtocol(
            "commit: operations of rank 0", "commit", "P / 64", False,
            lambda p: 20 + p if p <= BLOCK else 25 + _blocks(p),
        ),
        CountedProtocol(
            "commit: entries of the largest folder", "commit", "P / 64", False,
            lambda p: p + 2 if p <= BLOCK else max(BLOCK + 2, 2 * _blocks(p)),
        ),
        CountedProtocol("sweep: locks of the journal per trial", "sweep", "constant", False, lambda p: 5),
        CountedProtocol("sweep: lines of the journal per trial", "sweep", "constant", False, lambda p: 5),
        CountedProtocol("runs: operations of a listing", "runs", "runs", False, lambda n: 2 * n),
        CountedProtocol("runs: operations of a search by name", "runs", "constant", False, lambda n: 3),
    )
}  # fmt: skip
"""By name."""


def measure(progress: Callable[[str], None], sizes: Sequence[int] = SIZES) -> dict[str, dict[int, float]]:
    """Count all protocols at ``sizes``. Returns the counts by name and size."""
    kinds = process_counts.COUNTERS
    found: dict[str, dict[int, float]] = {}
    for torch in (False, True):
        chosen = [kind for kind in kinds if torch == (kind not in process_counts.WITHOUT_TORCH)]
        found |= process_counts.count(chosen, sizes, lambda kind: progress(f"counts of {kind}"))
    for name, counts in process_counts.count(["commit"], BLOCK_SIZES).items():
        found[name] |= counts
    return {name: found[name] for name in PROTOCOLS}


def save(counts: dict[str, dict[int, float]], path: Path = COUNTS) -> None:
    """Write counts as JSON."""
    path.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


def load(path: Path = COUNTS) -> dict[str, dict[int, float]]:
    """Read what ``save`` has written."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return {name: {int(size): value for size, value in counts.items()} for name, counts in content.items()}
