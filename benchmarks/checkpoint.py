"""Measure the cost of saving and loading a training, compared with disk, memory and other libraries.

Two ranks hold an FSDP2 model with AdamW. Each round measures every method once, in the same processes; the median of
the rounds counts. The limit of the disk is the time for the same bytes from the same two processes with direct I/O and
fsync from warm huge pages; that of a load is one direct read into them, without a check. ``stall`` is how long a
save blocks the training thread; ``slower`` is the extra time of the following steps until the save is durable;
``durable`` is the time until the bytes are on disk. Files are dropped from the page cache before they are loaded.
``ours: spread`` is a save whose interval is ten times its write, so that its writes are spread over most of that. It
adds less to the steps than the machine's noise does; so its writers are stopped and continued every quarter second,
and the multiplications meanwhile are compared with each other. ``no save`` is the same comparison without a save.
``frozen`` is the second save of a state of the same size, of which two percent have changed since the first. Exits with
1 if a target is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from side_by_side import run_ranks

RANKS = 2
SIZES = {"200 MB": 1, "600 MB": 3, "1.2 GB": 6}
"""Layers of the model: each holds 16.8 million parameters, with AdamW 201 MB."""
DEFAULT_SIZES = ("600 MB", "1.2 GB")
WIDTH = 4096
SETTLE_SECONDS = 1.5
"""Pause before each load. A file system that is mounted with ``discard`` frees the blocks of deleted files some time
after the deletion, and loads are slower meanwhile: without the pause, ours after it has deleted an older checkpoint."""
FEWEST_STEPS = 6
"""Number of steps measured from each asynchronous save on, if it is durable before."""
STEPS_AROUND = 12
"""Number of undisturbed steps before and after them."""
LARGEST_ERROR = 0.05
"""A run with more noise than this cannot show that a limit holds."""
INTERVAL = 10
"""Interval between two saves, in writes."""
SPREAD_SAVES = 3
"""Number of spread saves in each round."""
WINDOW_SECONDS = 0.25
"""For so long their writers run, and for so long they are stopped."""
CHANGED_PART = 0.02
"""Part of the state ``frozen`` that changes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument(
        "--directory", type=Path, help="directory on the disk to measure (default: the current directory)"
    )
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.rank is not None:
        _rank(options)
        return 0
    held = [_measure(size, options) for size in options.size or DEFAULT_SIZES]
    return 0 if all(held) else 1


# -- the two ranks -----------------------------------------------------------------------------------------------------


def _measure(size: str, options: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory(dir=options.directory or Path.cwd(), prefix="bench-") as folder:
        arguments = ["--rounds", str(options.rounds), "--size", size, "--directory", folder]
        found = run_ranks(__file__, arguments, ranks=RANKS)
    return _report(size, found)


def _rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=options.rank, world_size=RANKS)
    bench = Bench(options.directory, options.rank, SIZES[options.size[0]])
    found = bench.run(options.rounds)
    dist.barrier()
    bench.engine.close()
    if options.rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    """The measurements of one rank. Every figure is that of the slower rank, except for the extra time of steps: the
    mean of the ranks."""

    def __init__(self, directory: Path, rank: int, layers: int) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import fully_shard

        from hpcaccel.checkpoint import CheckpointEngine, TrainingState, capture_rng
        from hpcaccel.checkpoint.huge_pages import huge_pages
        from hpcaccel.checkpoint.snapshot_memory import SnapshotMemory

        self.torch, self.dist = torch, dist
        self.directory, self.rank = directory, rank
        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, foreach=True)
        self.x = torch.randn(2, WIDTH)
        self.step()
        self.state = TrainingState([self.model], [self.optimizer], per_rank={"rng": capture_rng()})
        self.saved: list[Any] = []
        self.control = control = dist.new_group(backend="gloo")
        self.engine = CheckpointEngine(
            directory / "ours",
            rank=rank,
            world_size=RANKS,
            group=control,
            keep=1,
            local_world_size=RANKS,
            on_saved=self.saved.append,
        )
        self.async_group = dist.new_group(backend="gloo")
        parts = [getattr(item, "_local_tensor", item) for item in self._tensors()]
        self.bytes = sum(item.numel() * item.element_size() for item in parts)
        self.parts = parts
        self.target = SnapshotMemory(self.bytes)
        self.huge = huge_pages(self.target.size)
        self.number = 0
        self.figures: dict[str, list[float]] = defaultdict(list)

    def _tensors(self) -> list[Any]:
        found: list[Any] = list(self.model.parameters())
        for state in self.optimizer.state.values():
            found += [item for item in state.values() if self.torch.is_tensor(item)]
        return found

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, rounds: int) -> dict[str, Any]:
        ways = [self.limit, self.memcpy, self.ours, self.ours_in_background, self.spread_and_none, self.frozen]
        ways += [self.dcp, *self._dcp_async()]
        if self._accelerate() is not None:
            ways.append(self.theirs)
        for number in range(rounds + 1):
            if number == 1:
                self.figures.clear()  # the first round fills caches and makes what is used again
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                self.number += 1
                self.dist.barrier()
                way()
        medians = {name: statistics.median(values) for name, values in self.figures.items()}
        for name in ("ours: spread", "no save"):
            for figure in ("slower part", "cost"):
                values = self.figures[f"{name}: {figure}"]
                medians[f"{name}: error of {figure}"] = _error_of_median(values)
        loads = [ours / dcp for ours, dcp in zip(self.figures["ours: load"], self.figures["dcp.load"], strict=True)]
        medians["error of the load ratio"] = _error_of_median(loads)
        return {"bytes": self._sum(self.bytes), "rounds": rounds, **medians}

    # -- the limits

    def limit(self) -> None:
        path = self.directory / f"limit.{self.rank}"
        self.dist.barrier()
        begin = time.perf_counter()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o640)
        done = 0
        while done < len(self.huge):
            done += os.pwrite(descriptor, self.huge[done:], done)
        os.fsync(descriptor)
        os.close(descriptor)
        self._note("limit", time.perf_counter() - begin)
        with self._timed("limit: load"):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            done = 0
            while done < len(self.huge):
                done += os.preadv(descriptor, [self.huge[done:]], done)
            os.close(descriptor)
        path.unlink()

    def memcpy(self) -> None:
        """Copy the state, piece by piece, to memory that is already mapped."""
        addresses = [(part.data_ptr(), part.numel() * part.element_size()) for part in self.parts]
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.target.view))
        self.dist.barrier()
        begin = time.perf_counter()
        at = base
        for address, size in addresses:
            ctypes.memmove(at, address, size)
            at += size
        self._note("memcpy", time.perf_counter() - begin)

    # -- ours

    def ours(self) -> None:
        with self._timed("ours: save"):
            path = self.engine.save(self.state, step=self.number)
        self.engine._retention.wait()  # a training that resumes does not delete an older checkpoint meanwhile
        self._drop_cache(path)
        with self._timed("ours: load"):
            self.engine.load(path, self.state, fall_back=False)

    def spread_and_none(self) -> None:
        for _ in range(SPREAD_SAVES):
            self.number += 1
            self.ours_spread()
        self.no_save()

    def ours_spread(self) -> None:
        from hpcaccel.runtime.training.save_schedule import SPREAD_PART

        known = self.figures["ours: background: durable"]
        background = self.engine.background
        background.spread_seconds = SPREAD_PART * INTERVAL * statistics.median(known or [0.4])

        def pause(stop: bool) -> None:
            assert background._writer is not None
            os.kill(background._writer._process.pid, signal.SIGSTOP if stop else signal.SIGCONT)

        self.ours_in_background("ours: spread", pause)
        background.spread_seconds = 0.0

    def no_save(self) -> None:
        """For as long as the last spread save took."""
        seconds = self.figures["ours: spread: durable"][-1]
        ends = time.perf_counter() + seconds
        self._in_turns("no save", lambda: None, lambda: time.perf_counter() > ends, lambda: seconds, lambda stop: None)

    def frozen(self) -> None:
        """Save everything, then only what has changed since."""
        if not hasattr(self, "frozen_engine"):
            torch, changed = self.torch, int(CHANGED_PART * self.bytes / 4)
            self.frozen_tensor, self.changing = torch.zeros(self.bytes // 4 - changed), torch.zeros(changed)
            self.frozen_engine = type(self.engine)(
                self.directory / "frozen",
                rank=self.rank,
                world_size=RANKS,
                group=self.control,
                keep=1,
                local_world_size=RANKS,
                on_saved=self.saved.append,
            )
        state = type(self.state)(per_rank={"frozen": self.frozen_tensor, "changing": self.changing})
        self.frozen_tensor.add_(1)
        for name in ("first", "second"):
            self.changing.add_(1)
            self.number += 1
            self.dist.barrier()
            begin = time.perf_counter()
            self.frozen_engine.save(state, step=self.number, background=True)
            self._note(f"frozen: {name} stall", time.perf_counter() - begin)
            self.frozen_engine.drain()
            last = self.saved[-1] if self.rank == 0 else None
            self._note(f"frozen: {name} seconds", 0.0 if last is None else last.seconds)
            self._note(f"frozen: {name} bytes", 0.0 if last is None else last.written_bytes)

    def ours_in_background(self, name: str = "ours: background", pause: Callable[[bool], None] | None = None) -> None:
        """Args: pause: stops the writer or continues it, to measure the steps with and without it in turns."""
        for part in self.parts:  # a step would change all tensors
            part.detach().view(-1)[:1].add_(1)

        def start() -> None:
            self.engine.save(self.state, step=self.number, background=True)

        def finished() -> bool:
            return self.engine.progress() != "busy"

        def end() -> float:
            self.engine.drain()
            return self.saved[-1].seconds if self.rank == 0 else 0.0  # the commit is rank 0's

        if pause is None:
            self._asynchronous(name, start, finished, end)
        else:
            self._in_turns(name, start, finished, end, pause)

    # -- torch's

    def _state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def dcp(self) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load
        from torch.distributed.checkpoint.state_dict_saver import save

        path = self.directory / f"dcp.{self.number}"
        state = self._state_dict()
        with self._timed("dcp.save"):
            save(state, checkpoint_id=path)
        self._drop_cache(path)
        with self._timed("dcp.load"):
            load(state, checkpoint_id=path)
        self._remove(path)

    def _dcp_async(self) -> list[Callable[[], None]]:
        from torch.distributed.checkpoint import staging
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        options = staging.StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        kinds = {
            "dcp.async_save, thread": (AsyncCheckpointerType.THREAD, options),
            "dcp.async_save, process": (
                AsyncCheckpointerType.PROCESS,
                staging.StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=True,
                    use_async_staging=False,
                    use_non_blocking_copy=False,
                ),
            ),
        }

        def way(name: str) -> None:
            kind, chosen = kinds[name]
            path = self.directory / f"dcp.{self.number}"
            state = self._state_dict()
            pending: list[Any] = []
            ended: list[float] = []
            begun = 0.0

            def start() -> None:
                nonlocal begun
                begun = time.perf_counter()
                future = async_save(
                    state,
                    checkpoint_id=path,
                    process_group=self.async_group,
                    async_checkpointer_type=kind,
                    async_stager=staging.DefaultStager(chosen),
                )
                pending.append(getattr(future, "upload_completion", future))
                pending[0].add_done_callback(lambda _: ended.append(time.perf_counter()))

            def end() -> float:
                pending[0].result()
                return ended[0] - begun

            self._asynchronous(name, start, lambda: bool(ended), end)
            self._remove(path)

        return [lambda name=name: way(name) for name in kinds]  # type: ignore[misc]

    # -- Accelerate's

    def _accelerate(self) -> Any:
        try:
            from accelerate import Accelerator
        except ImportError:
            return None
        if not hasattr(self, "accelerator"):
            import copy

            accelerator = Accelerator(cpu=True)
            whole = self.torch.nn.Sequential(
                *[self.torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(len(self.model))]
            )
            optimizer = self.torch.optim.AdamW(whole.parameters(), lr=1e-5, foreach=True)
            prepared, optimizer = accelerator.prepare(whole, optimizer)
            prepared(copy.deepcopy(self.x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            self.accelerator = accelerator
        return self.accelerator

    def theirs(self) -> None:
        path = self.directory / f"accelerate.{self.number}"
        with self._timed("Accelerate save_state"):
            self.accelerator.save_state(str(path))
        self._drop_cache(path)
        with self._timed("Accelerate load_state"):
            self.accelerator.load_state(str(path))
        self._remove(path)

    # -- taking time

    def _timed(self, name: str) -> Any:
        return _Timed(self, name)

    def _asynchronous(
        self, name: str, start: Callable[[], object], finished: Callable[[], bool], end: Callable[[], float]
    ) -> None:
        """Time of a save in the background, and the extra time of the steps meanwhile: over the mean of as many steps
        before and after the save, so that without a save it would be 0 on average.

        Args:
            end: how many seconds after its beginning it was durable.
        """
        undisturbed = self._steps(STEPS_AROUND)
        self.dist.barrier()
        begin = time.perf_counter()
        start()
        stall = time.perf_counter() - begin
        seconds: list[float] = []
        while not finished() or len(seconds) < FEWEST_STEPS:
            seconds += self._steps(1)
        durable = end()
        undisturbed += self._steps(STEPS_AROUND)
        usual = statistics.mean(undisturbed) * len(seconds)
        slower = sum(seconds) - usual
        self._note(f"{name}: durable", durable)
        self._note(f"{name}: slower part", slower / usual, mean=True)
        slower = self._note(f"{name}: slower", slower, mean=True)
        self._note(f"{name}: cost", self._note(f"{name}: stall", stall) + slower)

    def _in_turns(
        self,
        name: str,
        start: Callable[[], object],
        finished: Callable[[], bool],
        end: Callable[[], float],
        pause: Callable[[bool], None],
    ) -> None:
        """Like ``_asynchronous``, but the extra time is that of the multiplications while the writer runs over those
        while it is stopped. All ranks stop theirs at the same time. What the writer has missed it writes faster."""
        self.dist.barrier()
        begin = time.perf_counter()
        start()
        stall = time.perf_counter() - begin
        seconds: dict[bool, list[float]] = {True: [], False: []}
        done, is_stopped = {True: 0, False: 0}, False
        while is_stopped or not finished():
            changes = is_stopped != (is_stopped := int(time.monotonic() / WINDOW_SECONDS) % 2 == 1)
            if changes:
                pause(is_stopped)
            begin = time.perf_counter()
            self._multiply()
            done[is_stopped] += 1
            if not changes:  # otherwise the other rank's writer may still have run
                seconds[is_stopped].append(time.perf_counter() - begin)
        durable = end()
        usual = statistics.mean(seconds[True])
        slower = (statistics.mean(seconds[False]) - usual) * done[False]
        self._note(f"{name}: durable", durable)
        self._note(f"{name}: slower part", slower / (usual * sum(done.values())), mean=True)
        slower = self._note(f"{name}: slower", slower, mean=True)
        self._note(f"{name}: cost", self._note(f"{name}: stall", stall) + slower)

    def _steps(self, count: int) -> list[float]:
        """Steps as in a training, without communication, so that no rank waits for the other's disk."""
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            self._own_step()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def _own_step(self) -> None:
        for _ in range(8):
            self._multiply()

    def _multiply(self) -> None:
        self.torch.mm(_matrix(self.torch), _matrix(self.torch))

    def _note(self, name: str, seconds: float, *, mean: bool = False) -> float:
        """Note a figure: the largest of the ranks, or their mean, because the largest of two differences that are
        noise is above 0."""
        value = self.torch.tensor([seconds], dtype=self.torch.float64)
        self.dist.all_reduce(value, op=self.dist.ReduceOp.SUM if mean else self.dist.ReduceOp.MAX)
        self.figures[name].append(value.item() / (RANKS if mean else 1))
        return self.figures[name][-1]

    def _sum(self, number: int) -> int:
        value = self.torch.tensor([number])
        self.dist.all_reduce(value)
        return int(value.item())

    def _drop_cache(self, path: Path) -> None:
        """Drop the files from the page cache, and leave the disk idle: dirty pages are written first, and the blocks of
        deleted files are freed (``SETTLE_SECONDS``)."""
        self.dist.barrier()
        if self.rank == 0:
            for file in path.rglob("*"):
                if file.is_file():
                    descriptor = os.open(file, os.O_RDONLY)
                    os.fsync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(descriptor)
            time.sleep(SETTLE_SECONDS)
        self.dist.barrier()

    def _remove(self, path: Path) -> None:
        self.dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path)
        self.dist.barrier()


def _error_of_median(values: list[float]) -> float:
    """Standard error of a median, of values with a normal distribution; infinite for a single value."""
    return 1.25 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


class _Timed:
    def __init__(self, bench: Bench, name: str) -> None:
        self._bench, self._name = bench, name

    def __enter__(self) -> None:
        self._bench.dist.barrier()
        self._begin = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._bench._note(self._name, time.perf_counter() - self._begin)


_matrices: list[Any] = []


def _matrix(torch: Any) -> Any:
    if not _matrices:
        _matrices.append(torch.randn(700, 700))
    return _matrices[0]


# -- the table ---------------------------------------------------------------------------------------------------------


def _report(size: str, found: dict[str, Any]) -> bool:
    print(f"\n{size}: {found['bytes'] / 1e9:.3f} GB on {RANKS} ranks, medians of {found['rounds']} rounds")
    limit = found["limit"]
    for name in ("limit", "ours: save", "dcp.save", "Accelerate save_state"):
        if name in found:
            rate = found["bytes"] / found[name] / 1e9
            print(f"  {name:28}{found[name]:8.3f} s {rate:7.2f} GB/s {limit / found[name]:7.0%} of the limit")
    print(f"  {'':28}{'stall':>8}{'durable':>9}{'slower':>9}{'cost':>9}   s")
    print(f"  {'memcpy':28}{found['memcpy']:8.3f}")
    print(f"  {'frozen':28}{found['frozen: second stall']:8.3f}{found['frozen: second seconds']:9.3f}")
    ways = ["ours: background", "ours: spread", "no save", "dcp.async_save, thread", "dcp.async_save, process"]
    for name in ways:
        shown = [found[f"{name}: {figure}"] for figure in ("stall", "durable", "slower", "cost")]
        print(f"  {name:28}" + f"{shown[0]:8.3f}" + "".join(f"{value:9.3f}" for value in shown[1:]))
    for name in ("limit: load", "ours: load", "dcp.load", "Accelerate load_state"):
        if name in found:
            print(f"  {name:28}{found[name]:8.3f} s {found[name] / found['limit: load']:7.2f} of the limit")
    print(
        f"  steps slower without a save, by the same comparison: {found['no save: slower part']:.4f} "
        f"(error {found['no save: error of slower part']:.4f})"
    )
    # The disk limits both. A ratio counts as above 1 if it exceeds 1 by more than its standard error in this run.
    error = min(found["error of the load ratio"], LARGEST_ERROR)
    peers = min(found["dcp.save"], *(found[f"{name}: cost"] for name in ways[3:]))
    frozen = {unit: found[f"frozen: second {unit}"] / found[f"frozen: first {unit}"] for unit in ("bytes", "seconds")}
    return _targets(
        {
            "stall ≤ 1.2 × memcpy": (found["ours: spread: stall"] / found["memcpy"], 1.2),
            "frozen: stall ≤ 1.2 × memcpy": (found["frozen: second stall"] / found["memcpy"], 1.2),
            f"spread: steps slower by ≤ 2 % (error {found['ours: spread: error of slower part']:.4f})": (
                found["ours: spread: slower part"],
                0.02,
            ),
            "a save ≤ limit / 0.8": (found["ours: save"] / limit, 1.25),
            "durable in the background ≤ 1.5 × limit": (found["ours: background: durable"] / limit, 1.5),
            f"stall and slowdown ≤ 1/8 of DCP's (error {found['ours: spread: error of cost'] / peers:.3f})": (
                found["ours: spread: cost"] / peers,
                0.125,
            ),
            "frozen: bytes of the second save ≤ 0.05": (frozen["bytes"], 0.05),
            "frozen: time of the second save ≤ 0.50": (frozen["seconds"], 0.5),
            "load ≤ 1.25 × limit": (found["ours: load"] / found["limit: load"], 1.25),
            f"load ≤ 0.6 × dcp.load (standard error {error:.2f})": (
                found["ours: load"] / found["dcp.load"],
                0.6 + error,
            ),
        }
    )


def _targets(targets: dict[str, tuple[float, float]]) -> bool:
    for name, (value, most) in targets.items():
        print(f"  {name:56}{value:7.3f} of {most:.3f}   {'holds' if value <= most else 'FAILS'}")
    return all(value <= most for value, most in targets.values())


if __name__ == "__main__":
    sys.exit(main())
