"""Cost of a step, a training and a checkpoint on a GPU, compared with plain PyTorch, DCP and Accelerate.

``step`` and ``checkpoint`` each take turns in one process, ``throughput`` in processes one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from side_by_side import added

from gpu_kit.checks import Failed, environment, make_run, train

__all__ = ["checkpoint", "step", "throughput"]

Step = Callable[[], None]
SIDES = ("plain", "hpcaccel", "accelerate")
CASES = ("float32", "bf16", "fp16", "clipping")
LARGE = ("--depth", "12", "--width", "768", "--context", "1024", "--batch", "16", "--steps", "60", "--dropout", "0")
SMALL = ("--depth", "4", "--width", "128", "--context", "128", "--batch", "16", "--steps", "300", "--dropout", "0")
SIZES = {"depth 4, width 128": SMALL, "GPT-2 small, bf16": (*LARGE, "--precision", "bf16")}
WIDTH = 4096


def step(rounds: int) -> list[dict[str, Any]]:
    """Host time added to a step of a tiny model, and synchronisations with the GPU, compared with plain PyTorch."""
    return [_in_a_process("step", case, str(rounds)) for case in CASES]


def throughput(rounds: int, *, sizes: Sequence[str] = (), rehearse: bool = False) -> list[dict[str, Any]]:
    """Tokens per second of the GPT of jobs/gpt, small and at the size of GPT-2, batches from a DataLoader."""
    rows = []
    for name, size in SIZES.items():
        if sizes and name not in sizes:
            continue
        words = (*size, *(("--depth", "1", "--width", "64", "--steps", "6", "--batch", "2") if rehearse else ()))
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for number in range(rounds):
            for side in SIDES[number % 3 :] + SIDES[: number % 3]:
                found[side].append(train("--side", side, *words))
        medians = {side: statistics.median(one["tokens_a_second"] for one in each) for side, each in found.items()}
        memory = {side: max(one["memory"] for one in each) for side, each in found.items()}
        each_step = {side: statistics.median(one["median_seconds"] for one in each) for side, each in found.items()}
        rows.append(
            {
                "case": name,
                "rounds": rounds,
                "tokens_a_second": medians,
                "median_seconds": each_step,
                "bytes_of_gpu_memory": memory,
            }
        )
    return rows


def checkpoint(rounds: int, *, layers: int) -> dict[str, Any]:
    """Saves of a model with AdamW on the GPU: 201 MB per layer."""
    return _in_a_process("checkpoint", str(layers), str(rounds))


def _in_a_process(*words: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="bench-") as folder:
        variables = make_run(Path(folder), every_steps=10**9) | {"HPCACCEL_ATTEMPT": "1", "OMP_NUM_THREADS": "4"}
        ended = subprocess.run(
            [sys.executable, __file__, *words, "--directory", folder],
            env=environment() | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    if ended.returncode:
        raise Failed(ended.stdout[-2000:])
    found: dict[str, Any] = json.loads([line for line in ended.stdout.splitlines() if line.startswith("{")][-1])
    return found


# -- a step ------------------------------------------------------------------------------------------------------------


def _step(case: str, rounds: int) -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    steps = {side: _made(side, case) for side in SIDES}

    def piece(one: Step) -> Step:
        # The queue of kernels is empty when the clock is read, so that a piece holds all of its own work.
        def run() -> None:
            for _ in range(20):
                one()
            if cuda:
                torch.cuda.synchronize()

        return run

    pieces = {side: piece(one) for side, one in steps.items()}
    result = added(pieces["plain"], {side: pieces[side] for side in SIDES[1:]}, rounds=rounds, calls=1)
    return {
        "case": case,
        "plain": result.baseline / 20,
        "added": {side: seconds / 20 for side, seconds in result.by.items()},
        "device_seconds": {side: _device_seconds(one) for side, one in steps.items()} if cuda else {},
        "syncs_a_step": {side: _syncs(one) for side, one in steps.items()} if cuda else {},
    }


def _device_seconds(one: Step, count: int = 50) -> float:
    """Time between two CUDA events around ``count`` steps, per step: the fastest of five turns."""
    import torch

    found: list[float] = []
    event: Any = torch.cuda.Event  # its constructor has no annotations
    for _ in range(5):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(count):
            one()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / count)
    return min(found)


def _syncs(one: Step, count: int = 50) -> float:
    import torch

    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(count):
            one()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught) / count


def _made(side: str, case: str) -> Step:
    import torch
    from torch import nn
    from torch.nn.functional import mse_loss

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    x, y = torch.randn(32, 256, device=device), torch.randn(32, 1, device=device)
    precision = {"bf16": "bf16", "fp16": "fp16"}.get(case, "no")
    clips = case == "clipping"
    if side == "plain":
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

        def bare() -> None:
            with torch.autocast(device.type, dtype=dtype, enabled=precision != "no"):
                output = model(x)
            scaler.scale(mse_loss(output.float(), y)).backward()  # type: ignore[no-untyped-call]
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return bare
    accelerator: Any = _accelerator(side, precision)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    at_end: Step = accelerator.checkpoint if side == "hpcaccel" else lambda: None

    def one() -> None:
        accelerator.backward(mse_loss(prepared(x), y))
        if clips:
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        at_end()

    return one


def _accelerator(side: str, precision: str) -> Any:
    if side == "hpcaccel":
        from hpcaccel import Accelerator

        return Accelerator(mixed_precision=precision)
    from accelerate import Accelerator as Theirs

    return Theirs(mixed_precision=precision)


# -- a checkpoint ------------------------------------------------------------------------------------------------------


class Bench:
    """Saves of one rank's state, with each method in turn."""

    def __init__(self, directory: Path, layers: int) -> None:
        import torch
        from torch import nn

        from hpcaccel.checkpoint import CheckpointEngine, TrainingState, capture_rng

        self.torch, self.directory = torch, directory
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.x = torch.randn(4096, WIDTH, device=self.device)
        self.step()
        self.saved: list[Any] = []
        self.engine = CheckpointEngine(
            directory / "ours", rank=0, world_size=1, group=None, keep=1, on_saved=self.saved.append
        )
        self.state = TrainingState([self.model], [self.optimizer], per_rank={"rng": capture_rng(self.device)})
        held = [*self.model.parameters(), *self._moments()]
        self.bytes = sum(item.numel() * item.element_size() for item in held)
        self.held = held
        self.pinned = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self.number = 0
        self.stager: Any = None
        self.impossible: dict[str, str] = {}
        self.figures: dict[str, list[float]] = defaultdict(list)

    def _moments(self) -> list[Any]:
        every = [item for state in self.optimizer.state.values() for item in state.values()]
        return [item for item in every if self.torch.is_tensor(item) and item.numel() > 1]

    def run(self, rounds: int) -> dict[str, Any]:
        ways = [self.copy, self.disk, self.ours, self.in_background, self.torch_save, self.dcp, self.dcp_async]
        for number in range(rounds + 1):
            if number == 1:
                self.figures.clear()  # the first round makes what is used again: pinned memory, processes
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                self.number += 1
                self.wait()
                way()
        self.engine.close()
        medians = {name: statistics.median(values) for name, values in self.figures.items() if values}
        return {"bytes": self.bytes, "rounds": rounds, "impossible": self.impossible, **medians}

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def note(self, name: str, since: float) -> None:
        self.figures[name].append(time.perf_counter() - since)

    # -- the limits

    def copy(self) -> None:
        """Copy the state to pinned memory: the limit of the bus."""
        begin, at = time.perf_counter(), 0
        for item in self.held:
            size = item.numel() * item.element_size()
            flat = item.detach().reshape(-1).view(self.torch.uint8)
            self.pinned[at : at + size].copy_(flat, non_blocking=True)
            at += size
        self.wait()
        self.note("copy to pinned memory", begin)

    def disk(self) -> None:
        path = self.directory / "limit"
        block = 1 << 24
        view = memoryview(self.pinned.numpy())  # type: ignore[arg-type]
        begin = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for start in range(0, self.bytes, block):
                file.write(view[start : start + block])
            os.fsync(file.fileno())
        self.note("write and fsync", begin)
        path.unlink()

    # -- saves

    def ours(self) -> None:
        begin = time.perf_counter()
        self.engine.save(self.state, step=self.number)
        self.note("hpcaccel, waited for", begin)

    def in_background(self) -> None:
        def durable() -> float:
            self.engine.drain()
            return float(self.saved[-1].seconds)

        self._meanwhile(
            "hpcaccel, in the background",
            lambda: self.engine.save(self.state, step=self.number, background=True),
            lambda: self.engine.progress() != "busy",
            durable,
        )

    def torch_save(self) -> None:
        path = self.directory / "plain.pt"
        begin = time.perf_counter()
        with path.open("wb") as file:
            self.torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        self.note("torch.save and fsync", begin)
        path.unlink()

    def _state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def dcp(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        path = self.directory / f"dcp.{self.number}"
        state = self._state_dict()
        begin = time.perf_counter()
        save(state, checkpoint_id=path, no_dist=True)
        self.note("dcp.save", begin)
        shutil.rmtree(path)

    def dcp_async(self) -> None:
        """With pinned memory kept between saves, the fastest option of DCP; its default if that fails."""
        for pinned in (True, False) if self.device.type == "cuda" else (False,):
            name = f"dcp.async_save, {'pinned' if pinned else 'its default'}"
            if name not in self.impossible:
                self._dcp_async(name, pinned=pinned)

    def _dcp_async(self, name: str, *, pinned: bool) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import async_save

        if pinned and self.stager is None:
            self.stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=True, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=True
                )
            )
        path = self.directory / f"dcp.{self.number}"
        state = self._state_dict()
        ended: list[float] = []
        pending: list[Any] = []
        begin = 0.0

        def start() -> None:
            nonlocal begin
            begin = time.perf_counter()
            stager = self.stager if pinned else None
            future = async_save(state, checkpoint_id=path, async_stager=stager, no_dist=True)
            if hasattr(future, "staging_completion"):
                future.staging_completion.result()  # until then the state may not be changed
            pending.append(getattr(future, "upload_completion", future))
            pending[0].add_done_callback(lambda _: ended.append(time.perf_counter()))

        def durable() -> float:
            pending[0].result()
            return ended[0] - begin

        try:
            self._meanwhile(name, start, lambda: bool(ended), durable)
        except Exception as error:
            # A limit of this torch's, and no reason to measure nothing else.
            self.impossible[name] = f"{type(error).__name__}: {error}"
        shutil.rmtree(path, ignore_errors=True)

    def _meanwhile(
        self, name: str, start: Callable[[], object], finished: Callable[[], bool], durable: Callable[[], float]
    ) -> None:
        """Stall: how long the training thread is blocked. Then the extra time of the steps until the save is done."""
        undisturbed = statistics.median(self._timed_step() for _ in range(10))
        begin = time.perf_counter()
        start()
        self.note(f"{name}: stall", begin)
        slower, steps = 0.0, 0
        while not finished() and steps < 2000:
            slower += self._timed_step() - undisturbed
            steps += 1
        self.figures[f"{name}: durable after"].append(durable())
        self.figures[f"{name}: the steps meanwhile take longer"].append(slower)
        self.figures[f"{name}: steps meanwhile"].append(steps)

    def _timed_step(self) -> float:
        begin = time.perf_counter()
        self.step()
        self.wait()
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("step", "checkpoint"))
    parser.add_argument("case")
    parser.add_argument("rounds", type=int)
    parser.add_argument("--directory", type=Path, required=True)
    options = parser.parse_args()
    if options.what == "step":
        found = _step(options.case, options.rounds)
    else:
        found = Bench(options.directory, int(options.case)).run(options.rounds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
