"""Measure the time that a call of ``hpcaccel.stop_gate().step()`` adds to a training step.

Alone: one process in a run directory, compared with an empty loop. With 2 and 4 ranks: added to a step of a tiny model
in DistributedDataParallel, compared with an asynchronous all-reduce of one number that the next step waits for, which
is the least that ranks need to agree. The figures are rank 0's. Exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from itertools import count
from typing import Any

from side_by_side import Added, added

ALONE_LIMIT = 10e-6
"""Seconds per step."""
RANKS_LIMIT = 1.5
"""Ratio to the all-reduce."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    if options.rank is not None:
        found = _ranks(options) if options.ranks > 1 else _alone(options)
        if options.rank == 0:
            print(json.dumps([found.baseline, found.by]), flush=True)
        return 0
    baseline, by = _run(1, options.rounds)
    passed = by["gate"] <= ALONE_LIMIT
    print(f"{'alone':10}{'the gate adds':>16} {1e6 * by['gate']:7.1f} µs, limit {1e6 * ALONE_LIMIT:.0f} µs", flush=True)
    print(f"\n{'':10}{'DDP step':>12}{'all-reduce':>12}{'gate':>12}{'ratio':>9}{'limit':>8}")
    for ranks in (2, 4):
        baseline, by = _run(ranks, options.rounds)
        ratio = by["gate"] / by["all-reduce"]
        passed = passed and ratio <= RANKS_LIMIT
        shown = "".join(f"{1e6 * seconds:9.1f} µs" for seconds in (baseline, by["all-reduce"], by["gate"]))
        print(f"{f'{ranks} ranks':10}{shown}{ratio:9.2f}{RANKS_LIMIT:8.2f}", flush=True)
    return 0 if passed else 1


def _run(ranks: int, rounds: int) -> tuple[float, dict[str, float]]:
    """Seconds per step of the baseline, and what each way adds, on rank 0."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "HPCACCEL_"))}
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **outside, "HPCACCEL_RUN_DIR": folder, "HPCACCEL_ATTEMPT": "1", "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, __file__, "--rounds", str(rounds), "--ranks", str(ranks)]
        started = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdout=subprocess.PIPE,
                text=True,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        printed = [one.communicate()[0] for one in started]
    if any(one.returncode for one in started):
        sys.exit("a rank failed")
    baseline, by = json.loads(next(line for line in printed[0].splitlines() if line.startswith("[")))
    return baseline, by


def _alone(options: argparse.Namespace) -> Added:
    gate, steps = _gate(), count(1)
    return added(lambda: next(steps), {"gate": lambda: gate.step(next(steps))}, rounds=options.rounds, calls=1000)


def _gate() -> Any:
    import hpcaccel

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})  # as hpcaccel's launcher does
    return hpcaccel.stop_gate()


def _ranks(options: argparse.Namespace) -> Added:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gate, steps = _gate(), count(1)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(8, 16)
    own = dist.new_group(backend="gloo")
    pending: list[tuple[Any, Any]] = []

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        next(steps)

    def with_gate() -> None:
        step()
        gate.step(next(steps))

    def with_all_reduce() -> None:
        step()
        if pending:
            pending.pop()[1].wait()
        flag = torch.zeros(1, dtype=torch.int32)
        pending.append((flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=own, async_op=True)))

    return added(step, {"all-reduce": with_all_reduce, "gate": with_gate}, rounds=options.rounds)


if __name__ == "__main__":
    sys.exit(main())
