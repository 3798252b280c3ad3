"""Measure what hpcaccel, Accelerate and Lightning Fabric add to a step on two and four ranks, under DDP and FSDP2.

The loops take turns in the same processes and the same process group (gloo), each with a model of its own. A step
waits for ``DEVICE_SECONDS``, which stands for the work of a device, so that the ranks of a machine with few cores do
not compete for them. hpcaccel's loop checks at each step whether the ranks have agreed to save or to stop; it has a run
directory, a heartbeat and metrics. A second raw loop, with a model of its own like each of the others, shows what is no
library's time. The figures are medians of turns, with their standard errors: two ranks or more on
two cores, whose collectives wake threads, take steps of very different lengths. So three more figures are taken: CPU
time of the process; that of the thread that runs the loop (hooks and wrappers, without gloo's threads); mean time of
``checkpoint()`` and ``log()``, agreements included. Accelerate does not shard on CPUs, so it is left out of FSDP2.
Exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICE_SECONDS = 0.004
WIDTH = 64
CASES = [(2, "ddp"), (2, "fsdp2"), (4, "ddp"), (4, "fsdp2")]
MOST_SHARE, MOST_SECONDS = 0.01, 40e-6
"""Limits of what hpcaccel adds: a share of a step of 5 ms, and a time."""
STEP_SECONDS = 0.005
WARM_SECONDS = 6.0
"""Before the first turn hpcaccel's loop runs for so long: in its first 5 s, its ranks agree at every step."""
CALLS = 10
"""Steps of a piece; after each piece another loop takes its turn. A piece of hpcaccel's has one ``log()``."""
LOG_EVERY = CALLS
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time, "thread": time.thread_time}
_in_calls: list[float] = []
"""Seconds that each step of hpcaccel's loop spent in ``checkpoint()`` and ``log()``."""
Step = Callable[[], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--case", help="what a rank runs: ddp or fsdp2")
    options = parser.parse_args()
    if options.case:
        _rank(options.case, options.rounds)
        return 0
    passed = True
    sides = "".join(f"{side:>17}" for side in ("raw again", "Accelerate", "Fabric", "hpcaccel"))
    print(f"{'added to a step':16}{'raw loop':>12}{sides}{'limit':>10}")
    for size, kind in CASES:
        found = _measured(size, kind, options.rounds)
        limit = min(MOST_SECONDS, MOST_SHARE * STEP_SECONDS)
        within = found["ours"]["wall"][0] <= limit
        passed = passed and within
        for unit, title in (("wall", f"{kind}, {size} ranks"), ("cpu", "  CPU time"), ("thread", "  own thread")):
            shown = "".join(_cell(found.get(side), unit) for side in ("again", "accelerate", "fabric", "ours"))
            last = f"{1e6 * limit:7.0f} µs{'' if within else '  too slow'}" if unit == "wall" else ""
            print(f"{title:16}{1e6 * found['raw'][unit][0]:9.0f} µs{shown}{last}", flush=True)
        print(f"{'  in our calls':79}{_cell(found['calls'], 'mean')}", flush=True)
    print("\nmedians of turns and their standard errors; a mean in our calls. CPU time includes gloo's threads")
    return 0 if passed else 1


def _cell(found: dict[str, tuple[float, float]] | None, unit: str) -> str:
    if found is None:
        return f"{'–':>17}"
    median, error = found[unit]
    return f"{1e6 * median:7.0f} ±{1e6 * error:4.0f} µs"


def _measured(size: int, kind: str, rounds: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Start the ranks, and return rank 0's result: seconds per step of the raw loop, and what each side adds; medians
    and their standard errors."""
    with tempfile.TemporaryDirectory() as folder:
        _make_run(Path(folder), size)
        outside = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "HPCACCEL_"))}
        shared = {
            **outside, "HPCACCEL_RUN_DIR": folder, "HPCACCEL_ATTEMPT": "1", "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size), "NODE_RANK": "0", "GROUP_RANK": "0", "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip
        command = [sys.executable, __file__, "--case", kind, "--rounds", str(rounds)]
        ranks = [
            subprocess.Popen(
                command,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=None if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(size)
        ]
        printed = ranks[0].communicate()[0]
        codes = [one.wait() for one in ranks]
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if any(codes) or not lines:
        sys.exit(f"{kind} on {size} ranks: the ranks ended with {codes}\n{printed}")
    result: dict[str, dict[str, tuple[float, float]]] = json.loads(lines[-1])
    return result


def _make_run(folder: Path, ranks: int) -> None:
    spec = {"runtime": {}, "checkpoint": {"every_minutes": 60, "every_steps": 10**9}}
    launch = {
        "kind": "program", "program": [], "workdir": str(folder), "backend": "local", "nodes": 1,
        "ranks_per_node": ranks, "stop": "cooperative",
    }  # fmt: skip
    (folder / "spec.json").write_text(json.dumps({"version": 1, "spec": spec, "launch": launch}))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# -- in a rank ---------------------------------------------------------------------------------------------------------


def _rank(kind: str, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from hpcaccel.runtime.training import agreed_actions

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loops = {"raw": _raw(kind), "ours": _ours(kind), "again": _raw(kind)}
    if kind == "ddp":
        loops["accelerate"] = _accelerate()
    if (fabric := _fabric(kind)) is not None:
        loops["fabric"] = fabric
    for step in loops.values():
        for _ in range(CALLS):
            step()
    in_other_loops = 0.0
    # How often hpcaccel's ranks agree depends on the time of a step, of which the other loops' turns are no part.
    vars(agreed_actions)["monotonic"] = lambda: time.monotonic() - in_other_loops
    ends = time.monotonic() + WARM_SECONDS
    while _is_before(ends):
        for _ in range(CALLS):
            loops["ours"]()
    taken: dict[str, dict[str, list[float]]] = {name: {unit: [] for unit in CLOCKS} for name in loops}
    _in_calls.clear()
    order = list(loops.items())
    for number in range(rounds):
        for name, step in order[number % len(order) :] + order[: number % len(order)]:
            began = {unit: clock() for unit, clock in CLOCKS.items()}
            for _ in range(CALLS):
                step()
            passed = {unit: clock() - began[unit] for unit, clock in CLOCKS.items()}
            for unit, seconds in passed.items():
                taken[name][unit].append(seconds / CALLS)
            in_other_loops += 0.0 if name == "ours" else passed["wall"]
    dist.barrier()
    if dist.get_rank() == 0:
        error = statistics.stdev(_in_calls) / len(_in_calls) ** 0.5
        calls = {"calls": {"mean": (statistics.fmean(_in_calls), error)}}
        added = {name: _added(found, taken["raw"], name) for name, found in taken.items()}
        print(json.dumps(added | calls), flush=True)
    # The libraries would leave the process group one after the other, and hpcaccel would save.
    os._exit(0)


def _is_before(ends: float) -> bool:
    """Whether it is before ``ends`` on rank 0; the same on all ranks."""
    import torch
    import torch.distributed as dist

    before = torch.tensor(time.monotonic() < ends)
    dist.broadcast(before, 0)
    return bool(before)


def _added(found: dict[str, list[float]], raw: dict[str, list[float]], name: str) -> dict[str, tuple[float, float]]:
    """Median and standard error of the time of a step of the raw loop, or of what another loop adds to it in the same
    turn."""
    added = {}
    for unit, seconds in found.items():
        values = seconds if name == "raw" else [one - other for one, other in zip(seconds, raw[unit], strict=True)]
        median = statistics.median(values)
        # For a normal distribution the standard error of a median is 1.253 σ / √n, and σ is 1.483 of the median
        # deviation.
        deviation = statistics.median(abs(value - median) for value in values)
        added[unit] = median, 1.253 * 1.483 * deviation / len(values) ** 0.5
    return added


def _parts() -> tuple[Any, Any, Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    return model, torch.optim.AdamW, torch.randn(8, WIDTH), torch.randn(8, 1)


def _steps(
    model: Any, optimizer: Any, x: Any, y: Any, backward: Callable[[Any], None], at_end: Callable[[Any], None]
) -> Step:
    from torch.nn.functional import mse_loss

    def step() -> None:
        loss = mse_loss(model(x), y)
        backward(loss)
        time.sleep(DEVICE_SECONDS)
        optimizer.step()
        optimizer.zero_grad()
        at_end(loss)

    return step


def _raw(kind: str) -> Step:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer, x, y = _parts()
    if kind == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return _steps(model, optimizer(model.parameters(), lr=1e-3), x, y, torch.Tensor.backward, lambda loss: None)


def _ours(kind: str) -> Step:
    from hpcaccel import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "fsdp2" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, optimizer, x, y = _parts()
    model, prepared = accelerator.prepare(model, optimizer(model.parameters(), lr=1e-3))

    def at_end(loss: Any) -> None:
        began = time.perf_counter()
        if accelerator.step % LOG_EVERY == 0:
            accelerator.log({"loss": loss})
        accelerator.checkpoint()
        _in_calls.append(time.perf_counter() - began)

    return _steps(model, prepared, x, y, accelerator.backward, at_end)


def _accelerate() -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, x, y = _parts()
    model, prepared = accelerator.prepare(model, optimizer(model.parameters(), lr=1e-3))
    return _steps(model, prepared, x, y, accelerator.backward, lambda loss: None)


def _fabric(kind: str) -> Step | None:
    """Fabric's loop; None if Lightning is not installed."""
    try:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies.ddp import DDPStrategy
        from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
    except ImportError:
        return None

    def sharded(model: Any, mesh: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    size = int(os.environ["WORLD_SIZE"])
    strategy = DDPStrategy(gradient_as_bucket_view=True) if kind == "ddp" else ModelParallelStrategy(sharded, size, 1)
    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy)
    fabric.launch()
    model, optimizer, x, y = _parts()
    model = fabric.setup_module(model)
    prepared = fabric.setup_optimizers(optimizer(model.parameters(), lr=1e-3))
    return _steps(model, prepared, x, y, fabric.backward, lambda loss: None)


if __name__ == "__main__":
    sys.exit(main())
