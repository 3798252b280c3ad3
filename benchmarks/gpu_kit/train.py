"""Train the GPT of ``jobs/gpt`` on rows of counted bytes: in plain PyTorch, with hpcaccel or with Accelerate.

Prints one JSON line: the losses as hexadecimal floats, a checksum of the final weights, tokens per second.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import signal
import statistics
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

WARM_UP_STEPS = 10
MODEL = Path(__file__).parents[2] / "jobs/gpt"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=("plain", "hpcaccel", "accelerate"), default="hpcaccel")
    parser.add_argument("--precision", choices=("no", "fp16", "bf16", "fp8"), default="no")
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--kill-at", type=int, help="send SIGKILL to itself after this step of the first attempt")
    parser.add_argument("--losses", type=Path, help="append a line `step loss` to this file at each step")
    parser.add_argument("--count-syncs", action="store_true", help="count warnings of torch's sync debug mode")
    return parser.parse_args()


def parts(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    sys.path.insert(0, str(MODEL))
    torch.manual_seed(0)
    model = import_module("model").GPT(
        depth=args.depth, width=args.width, heads=max(1, args.width // 64), context=args.context, dropout=args.dropout
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    # Each row counts on from a random byte, which is soon learned.
    first = torch.randint(0, 256, (args.steps * args.batch, 1), generator=torch.Generator().manual_seed(1))
    text = (first + torch.arange(args.context + 1)) % 256
    data = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    pin = torch.cuda.is_available()
    return model, optimizer, DataLoader(data, batch_size=args.batch, shuffle=args.shuffle, pin_memory=pin)


class Watch:
    """Times the steps after the warm-up, and counts synchronisations that torch warns about."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._count = args.count_syncs and torch.cuda.is_available()
        self._done = 0
        self._times: list[float] = []
        self._caught: list[Any] = []

    def step(self) -> None:
        self._done += 1
        self._times.append(time.perf_counter())
        if self._done == min(WARM_UP_STEPS, self._args.steps // 2):
            _synchronize()
            self._begin = time.perf_counter()
            self._timed_from = self._done
            if self._count:
                torch.cuda.set_sync_debug_mode("warn")

    def end(self) -> dict[str, float]:
        if self._count:
            torch.cuda.set_sync_debug_mode("default")
        _synchronize()
        steps = self._done - self._timed_from
        seconds = (time.perf_counter() - self._begin) / max(1, steps)
        between = [later - one for one, later in itertools.pairwise(self._times[self._timed_from :])]
        tokens = self._args.batch * self._args.context
        syncs = sum("synchroniz" in str(one.message) for one in self._caught)
        return {
            "seconds_a_step": seconds,
            "median_seconds": statistics.median(between or [seconds]),
            "tokens_a_second": tokens / seconds,
            "syncs_a_step": syncs / max(1, steps),
        }

    @contextlib.contextmanager
    def catching(self) -> Any:
        with warnings.catch_warnings(record=True) as self._caught:
            warnings.simplefilter("always" if self._count else "ignore")
            yield


def main() -> None:
    args = options()
    side = {"plain": plain, "hpcaccel": ours, "accelerate": theirs}[args.side]
    watch = Watch(args)
    with watch.catching():
        losses, weights, more = side(args, watch)
        figures = watch.end()
    shown = [float(loss).hex() for loss in losses]
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print(json.dumps({"losses": shown, "weights": checksum(weights), "memory": memory, **figures, **more}))


def plain(args: argparse.Namespace, watch: Watch) -> tuple[list[Tensor], Any, dict[str, Any]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer, loader = parts(args)
    model.to(device)
    if args.compile:
        model.compile()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    losses = []
    for tokens, targets in loader:
        tokens, targets = tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext():
            loss = model(tokens, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
        watch.step()
    return losses, model, {}


def theirs(args: argparse.Namespace, watch: Watch) -> tuple[list[Tensor], Any, dict[str, Any]]:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        mixed_precision=args.precision, dataloader_config=DataLoaderConfiguration(non_blocking=True)
    )
    losses, model = _loop(args, accelerator, watch)
    return losses, accelerator.unwrap_model(model), {}


def ours(args: argparse.Namespace, watch: Watch) -> tuple[list[Tensor], Any, dict[str, Any]]:
    from hpcaccel import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        mixed_precision=args.precision,
        strategy=args.strategy,
        deterministic=args.deterministic or None,
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    losses, model = _loop(args, accelerator, watch)
    return losses, accelerator.unwrap_model(model), {"device": str(accelerator.device), "step": accelerator.step}


def _loop(args: argparse.Namespace, accelerator: Any, watch: Watch) -> tuple[list[Tensor], Any]:
    model, optimizer, loader = parts(args)
    if args.compile:
        model.compile()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    own = args.side == "hpcaccel"
    losses = []
    for _ in accelerator.epochs(1) if own else range(1):
        for tokens, targets in loader:
            loss = model(tokens, targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if args.losses is not None:
                with args.losses.open("a") as lines:
                    lines.write(f"{accelerator.step} {float(loss).hex()}\n")
            if own:
                accelerator.checkpoint()
                if args.kill_at == accelerator.step and os.environ.get("HPCACCEL_ATTEMPT") == "1":
                    _wait_for_a_commit()
                    os.kill(os.getpid(), signal.SIGKILL)
            watch.step()
    return losses, model


def _wait_for_a_commit() -> None:
    """Wait for a committed checkpoint to resume from: such an early kill may come before the first save is durable."""
    folder = Path(os.environ["HPCACCEL_RUN_DIR"]) / "checkpoints"
    limit = time.monotonic() + 60
    while not list(folder.glob("step_*")):
        if time.monotonic() > limit:
            sys.exit(f"no checkpoint was committed within 60 s: {[str(path) for path in folder.rglob('*')]}")
        time.sleep(0.05)


def checksum(model: Any) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(name.encode())
        found.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
