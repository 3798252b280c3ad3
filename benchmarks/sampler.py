"""Measure how long a rank takes to find its samples, with hpcaccel and Accelerate, in turns; medians.

    python benchmarks/sampler.py

Ranks are simulated: each measurement is that of a rank in the middle of the world. Exits with 1 if a limit is
exceeded.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from hpcaccel.runtime.data.permutation import PermutationSampler
from hpcaccel.runtime.data.sampling import Order
from hpcaccel.runtime.data.sharding import Sharing

TURNS = 7
BATCH = 32
STEPS = 60
RESUMED = 3_200_000 + 32 * 50
SKIPPED = 100_000
LARGE = 10_000_000


def main() -> int:
    try:
        import accelerate
    except ImportError:
        print("accelerate is not installed. Install it with: pip install 'hpcaccel[bench]'")
        return 1
    print(f"torch {torch.__version__}, accelerate {accelerate.__version__}, medians of {TURNS} turns\n")
    print(f"{'':58}{'hpcaccel':>12}{'accelerate':>12}{'randperm':>11}{'limit':>10}")
    passed = [_step(size) for size in (8, 256, 1024)]
    passed += _resume()
    passed += _large()
    return 0 if all(passed) else 1


def _loader(samples: int, sampler: Any = None) -> DataLoader[Any]:
    data: Any = range(samples)
    options: dict[str, Any] = {"sampler": sampler} if sampler is not None else {"shuffle": True}
    return DataLoader(data, batch_size=BATCH, generator=torch.Generator().manual_seed(1), **options)


def _part(loader: DataLoader[Any], *, size: int, start: int = 0) -> Any:
    order = Order(loader, 0)
    order.begin(0)
    sharing = Sharing(rank=size // 2, size=size, batch_size=BATCH)
    return iter(order.part(sharing, start))


def _peer(sampler: Any, *, size: int) -> Any:
    from accelerate.data_loader import BatchSamplerShard

    return BatchSamplerShard(BatchSampler(sampler, BATCH, False), size, size // 2)


def _step(size: int) -> bool:
    samples = size * BATCH * (STEPS + 2)
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    sampler = RandomSampler(range(samples), generator=torch.Generator().manual_seed(1))
    for _ in range(TURNS):
        seconds["ours"].append(_per_step(_part(_loader(samples), size=size)))
        seconds["peer"].append(_per_step(iter(_peer(sampler, size=size))))
    return _row(f"a local step, shuffled, bs 32, {size} ranks", seconds, scale=1e6, unit="µs", limit=20e-6)


def _per_step(batches: Any) -> float:
    next(batches)  # draws the order
    begin = time.perf_counter()
    for _ in range(STEPS):
        next(batches)
    return (time.perf_counter() - begin) / STEPS


def _resume() -> list[bool]:
    """The first batch after 100,000 batches of an epoch."""
    seconds: dict[str, list[float]] = {"ours": [], "peer": [], "permuted": [], "randperm": []}
    from accelerate.data_loader import SkipBatchSampler

    for _ in range(TURNS):
        seconds["randperm"].append(_timed(lambda: torch.randperm(RESUMED)))
        loader = _loader(RESUMED)
        seconds["ours"].append(_timed(lambda: next(_part(loader, size=1, start=SKIPPED * BATCH))))  # noqa: B023
        permuted = _loader(RESUMED, PermutationSampler(RESUMED))
        seconds["permuted"].append(_timed(lambda: next(_part(permuted, size=1, start=SKIPPED * BATCH))))  # noqa: B023
        batches = BatchSampler(RandomSampler(range(RESUMED), generator=torch.Generator().manual_seed(1)), BATCH, False)
        seconds["peer"].append(_timed(lambda: next(iter(SkipBatchSampler(batches, SKIPPED)))))  # noqa: B023
    base = statistics.median(seconds["randperm"])
    ours = {"ours": seconds["ours"], "peer": seconds["peer"], "randperm": seconds["randperm"]}
    mine = {"ours": seconds["permuted"], "peer": seconds["peer"]}
    return [
        _row("first batch after 100,000 batches", ours, scale=1e3, unit="ms", limit=1.2 * base),
        _row("  with PermutationSampler", mine, scale=1e3, unit="ms", limit=10e-3),
    ]


def _timed(what: Callable[[], object]) -> float:
    begin = time.perf_counter()
    what()
    return time.perf_counter() - begin


def _large() -> list[bool]:
    """A shuffled sampler over 10 M samples: time to the first batch, and increase of peak memory, each in a new
    process."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("ours", "peer", "permuted", "randperm")}
    for _ in range(3):
        for name, measured in found.items():
            output = subprocess.run([sys.executable, __file__, name], check=True, capture_output=True, text=True).stdout
            measured.append(tuple(json.loads(output.splitlines()[-1])))
    seconds = {name: [first for first, _ in measured] for name, measured in found.items()}
    mebibytes = {name: [second for _, second in measured] for name, measured in found.items()}
    passed = []
    for what, values, unit, scale, own_limit in (
        ("start of a shuffled sampler over 10 M samples", seconds, "ms", 1e3, 10e-3),
        ("memory of a shuffled sampler over 10 M samples", mebibytes, "MiB", 1.0, 1.0),
    ):
        base = statistics.median(values["randperm"])
        all_ours = {name: values[name] for name in ("ours", "peer", "randperm")}
        passed.append(_row(what, all_ours, scale=scale, unit=unit, limit=1.2 * base))
        permuted = {"ours": values["permuted"], "peer": values["peer"]}
        passed.append(_row("  with PermutationSampler", permuted, scale=scale, unit=unit, limit=own_limit))
    return passed


def _start(name: str) -> None:
    """In a new process: print the seconds and the MiB for the first batch of 10 M samples."""
    from accelerate.data_loader import BatchSamplerShard  # noqa: F401  (imported before the memory is looked at)

    torch.randperm(1000).tolist()
    next(_part(_loader(20_000, PermutationSampler(20_000)), size=8))
    before = _peak()
    begin = time.perf_counter()
    if name == "randperm":
        kept: Any = torch.randperm(LARGE)
    elif name == "peer":
        kept = iter(_peer(RandomSampler(range(LARGE), generator=torch.Generator().manual_seed(1)), size=8))
        next(kept)
    else:
        kept = _part(_loader(LARGE, PermutationSampler(LARGE) if name == "permuted" else None), size=8)
        next(kept)
    took = time.perf_counter() - begin
    print(json.dumps([took, (_peak() - before) / 2**20]))
    del kept


def _peak() -> float:
    """Peak resident memory of this process in bytes."""
    with open("/proc/self/status") as status:
        return 1024 * next(float(line.split()[1]) for line in status if line.startswith("VmHWM"))


def _row(what: str, values: dict[str, list[float]], *, scale: float, unit: str, limit: float) -> bool:
    medians = {name: statistics.median(found) for name, found in values.items()}
    within = medians["ours"] <= limit
    shown = [f"{medians[name] * scale:.1f} {unit}" if name in medians else "" for name in ("ours", "peer", "randperm")]
    verdict = "" if within else "  too much"
    print(f"{what:58}{shown[0]:>12}{shown[1]:>12}{shown[2]:>11}{limit * scale:6.1f} {unit}{verdict}", flush=True)
    return within


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _start(sys.argv[1])
    else:
        sys.exit(main())
