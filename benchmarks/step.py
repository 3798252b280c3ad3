"""Measure the time that hpcaccel and Accelerate add to a training step in plain PyTorch, in the same run.

Each case runs in a new process, in which the plain loop, hpcaccel's and Accelerate's take turns with models of the same
size. hpcaccel's loop checks at every step whether to save or to stop, and has a run directory. Then strace counts the
file system calls of 1,000 steps. Exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from side_by_side import added

CASES = {
    "SGD": "sgd",
    "AdamW": "adamw",
    "SGD, scheduler, clipping": "schedule",
    "accumulation 4, a micro-batch": "accumulate",
    "bf16": "bf16",
}
LIMIT = 0.07
MOST_CALLS = 0.1
"""File system calls per step. A step makes none itself, but files written after 1, 2, 4 … seconds may be counted."""
Step = Callable[[], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=301)
    parser.add_argument("--case", choices=CASES.values())
    parser.add_argument("--only", help="run only one side for this many steps, for strace: ours:100")
    parser.add_argument("--no-strace", action="store_true", help="do not count system calls")
    options = parser.parse_args()
    if options.case is None:
        quick = _table(options.rounds)
        return 0 if (options.no_strace or _no_files()) and quick else 1
    if options.only:
        side, count = options.only.split(":")
        step = SIDES[side](options.case)
        for _ in range(int(count)):
            step()
        return 0
    ways = {side: SIDES[side](options.case) for side in ("ours", "theirs")}
    result = added(SIDES["plain"](options.case), ways, rounds=options.rounds)
    print(json.dumps([result.baseline, result.by["ours"], result.by["theirs"]]))
    return 0


# -- the three loops, each over one batch that stays where it is ------------------------------------------------------


def _parts(case: str) -> tuple[Any, Any, Any, Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    kind = torch.optim.AdamW if case == "adamw" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-3)
    scheduler = None
    if case == "schedule":
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step)
    return model, optimizer, scheduler, torch.randn(8, 16), torch.randn(8, 1)


def _plain(case: str) -> Step:
    import torch
    from torch.nn.functional import mse_loss

    model, optimizer, scheduler, x, y = _parts(case)
    done = 0

    def step() -> None:
        mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def with_schedule() -> None:
        mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    def accumulated() -> None:
        nonlocal done
        done += 1
        (mse_loss(model(x), y) / 4).backward()  # type: ignore[no-untyped-call]
        if done % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    def bf16() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        mse_loss(output.float(), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return {"schedule": with_schedule, "accumulate": accumulated, "bf16": bf16}.get(case, step)


def _ours(case: str) -> Step:
    from hpcaccel import Accelerator

    accelerator = Accelerator(
        gradient_accumulation_steps=4 if case == "accumulate" else 1, mixed_precision="bf16" if case == "bf16" else "no"
    )
    return _prepared(case, accelerator, accelerator.checkpoint)


def _theirs(case: str) -> Step:
    try:
        from accelerate import Accelerator
    except ImportError:
        sys.exit("this program needs accelerate for comparison. Install it with: pip install 'hpcaccel[bench]'")

    accelerator = Accelerator(
        gradient_accumulation_steps=4 if case == "accumulate" else 1, mixed_precision="bf16" if case == "bf16" else "no"
    )
    return _prepared(case, accelerator, None)


def _prepared(case: str, accelerator: Any, at_end: Step | None) -> Step:
    from torch.nn.functional import mse_loss

    model, optimizer, scheduler, x, y = _parts(case)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    at_end = at_end or (lambda: None)

    def step() -> None:
        accelerator.backward(mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        at_end()

    def with_schedule() -> None:
        accelerator.backward(mse_loss(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        at_end()

    def accumulated() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        at_end()

    return {"schedule": with_schedule, "accumulate": accumulated}.get(case, step)


SIDES: dict[str, Callable[[str], Step]] = {"plain": _plain, "ours": _ours, "theirs": _theirs}


# -- the table ---------------------------------------------------------------------------------------------------------


def _table(rounds: int) -> bool:
    passed = True
    print(f"{'added to a step':32}{'plain loop':>12}{'Accelerate':>12}{'hpcaccel':>12}{'ratio':>9}{'limit':>8}")
    for name, case in CASES.items():
        baseline, ours, theirs = json.loads(_run(case, "--rounds", str(rounds)))
        ratio = ours / theirs
        passed = passed and ratio <= LIMIT
        shown = "".join(f"{1e6 * seconds:9.1f} µs" for seconds in (baseline, theirs, ours))
        print(
            f"{name:32}{shown}{ratio:9.2f}{LIMIT:8.2f}{'' if ratio <= LIMIT else f'  missed by {ratio - LIMIT:.2f}'}",
            flush=True,
        )
    return passed


def _run(case: str, *arguments: str, before: tuple[str, ...] = ()) -> str:
    with tempfile.TemporaryDirectory() as folder:
        _make_run(Path(folder))
        outside = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "HPCACCEL_"))}
        environment = {**outside, "HPCACCEL_RUN_DIR": folder, "HPCACCEL_ATTEMPT": "1", "OMP_NUM_THREADS": "1"}
        command = [*before, sys.executable, __file__, "--case", case, *arguments]
        ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    printed = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    return printed[-1] if printed else ""


def _make_run(folder: Path) -> None:
    spec = {"runtime": {}, "checkpoint": {"every_minutes": 60, "every_steps": 10**9}}
    launch = {
        "kind": "program", "program": [], "workdir": str(folder), "backend": "local", "nodes": 1, "ranks_per_node": 1,
        "stop": "cooperative",
    }  # fmt: skip
    document = {"version": 1, "spec": spec, "launch": launch}
    (folder / "spec.json").write_text(json.dumps(document))


def _no_files() -> bool:
    """Whether steps do not use the file system: strace counts the calls of 200 and of 1,200 steps."""
    if shutil.which("strace") is None:
        print("system calls were not counted: strace is not installed")
        return True
    passed = True
    print(f"\n{'file system calls per step':32}{'':12}{'Accelerate':>12}{'hpcaccel':>12}")
    for name, case in CASES.items():
        calls = {side: (_calls(case, side, 1200) - _calls(case, side, 200)) / 1000 for side in ("theirs", "ours")}
        is_few = calls["ours"] <= MOST_CALLS
        passed = passed and is_few
        print(f"{name:32}{'':12}{calls['theirs']:12.2f}{calls['ours']:12.2f}{'' if is_few else '  too many'}")
    return passed


def _calls(case: str, side: str, steps: int) -> int:
    with tempfile.NamedTemporaryFile("r") as found:
        strace = ("strace", "-f", "-qq", "-e", "trace=%file,%desc", "-e", "signal=none", "-o", found.name)
        _run(case, "--only", f"{side}:{steps}", before=strace)
        return sum(1 for line in found if re.match(r"\d+ +\w+\(", line))


if __name__ == "__main__":
    sys.exit(main())
