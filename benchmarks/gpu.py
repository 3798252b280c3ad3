"""Checks and measurements that need a GPU.

Checks NCCL, bf16, fp16 and fp8, CUDA's random state in bit-exact resumes, out of memory, the preflight. Measures the
cost of a step and its synchronisations with the GPU, the throughput of ``jobs/gpt``, and how long a checkpoint blocks
the training, compared with plain PyTorch, DCP and Accelerate in the same run. Prints tables and writes JSON, in under
eight minutes: parts that do not begin in time are left out and named. Without a GPU it lists the checks and
measurements. Needs this repository and packages of PyPI, and no network. Exits with 1 if a check fails or a part was
left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_kit import checks, speed

LIMIT_MINUTES = 8.0
EXPECTED_SECONDS = {"checks": 0, "step": 60, "throughput": 90, "checkpoint": 90}
"""Time that a part needs at most, as it is expected; the checks always begin."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="file for all figures (default: gpu.json)")
    parser.add_argument("--minutes", type=float, default=LIMIT_MINUTES, help="a part begins only if its time is left")
    parser.add_argument("--only", choices=("checks", "step", "throughput", "checkpoint"), action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--layers", type=int, default=12, help="number of layers of the saved model; 201 MB each with AdamW"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="run tiny versions on the CPU, to test this program itself"
    )
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not options.rehearse:
        return _say_what_it_would_do(options.json)
    found: dict[str, Any] = {"machine": _machine()}
    print(json.dumps(found["machine"]), flush=True)
    parts: dict[str, Callable[[], Any]] = {
        "checks": lambda: _checks(rehearse=options.rehearse),
        "step": lambda: _shown_steps(speed.step(11 if options.rehearse else 20 * options.rounds + 1)),
        "throughput": lambda: _shown_throughput(speed.throughput(options.rounds, rehearse=options.rehearse)),
        "checkpoint": lambda: _shown_checkpoint(speed.checkpoint(options.rounds, layers=options.layers)),
    }
    failed, started = False, time.monotonic()
    for name, part in parts.items():
        if options.only and name not in options.only:
            continue
        begin = time.monotonic()
        if begin - started + EXPECTED_SECONDS[name] > 60 * options.minutes and not options.rehearse:
            found[name] = {"failed": f"left out: {begin - started:.0f} s of {60 * options.minutes:.0f} s are over"}
            print(f"{name} {found[name]['failed']}. Run it alone: --only {name}")
            failed = True
            continue
        try:
            found[name] = part()
        except checks.Failed as error:
            found[name] = {"failed": str(error)}
            print(f"{name} FAILED: {error}")
        failed = failed or "failed" in json.dumps(found[name])
        print(f"({name}: {time.monotonic() - begin:.0f} s)", flush=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"all parts: {time.monotonic() - started:.0f} s, limit {60 * options.minutes:.0f} s; figures in {options.json}"
    )
    return 1 if failed else 0


def _say_what_it_would_do(figures: Path) -> int:
    print(f"this machine has no GPU. With a GPU this program takes less than {LIMIT_MINUTES:g} minutes, and checks:")
    for name, check in checks.CHECKS.items():
        print(f"  {name:18}{(check.__doc__ or '').strip().splitlines()[0]}")
    print("and measures:")
    for part in (speed.step, speed.throughput, speed.checkpoint):
        print(f"  {part.__name__:18}{(part.__doc__ or '').strip().splitlines()[0]}")
    print(f"It prints tables and writes all figures to {figures}.")
    return 0


def _machine() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return found


def _checks(*, rehearse: bool) -> dict[str, str]:
    found = {}
    for name, check in checks.CHECKS.items():
        if rehearse and name in checks.NEED_CUDA:
            continue
        begin = time.monotonic()
        try:
            found[name] = f"ok: {check()}"
        except checks.Skipped as reason:
            found[name] = f"not checked: {reason}"
        except checks.Failed as error:
            found[name] = f"failed: {error}"
        print(f"{name:18}{found[name]} ({time.monotonic() - begin:.0f} s)", flush=True)
    return found


def _shown_steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    print(
        f"{'per step':12}{'plain':>12}{'Accelerate adds':>18}{'hpcaccel adds':>16}   "
        "syncs per step: plain, Accelerate, hpcaccel"
    )
    for row in rows:
        more = row["added"]
        shown = f"{1e6 * row['plain']:9.1f} µs{1e6 * more['accelerate']:15.1f} µs{1e6 * more['hpcaccel']:13.1f} µs"
        syncs = [f"{row['syncs_a_step'].get(side, 0):.2f}" for side in ("plain", "accelerate", "hpcaccel")]
        print(f"{row['case']:12}{shown}   {', '.join(syncs)}")
        if row["device_seconds"]:
            device = ", ".join(f"{side} {1e6 * seconds:.1f} µs" for side, seconds in row["device_seconds"].items())
            print(f"{'':12}by CUDA events: {device}")
    return rows


def _shown_throughput(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    print(f"{'tokens/s':20}{'plain':>14}{'Accelerate':>14}{'hpcaccel':>14}{'of plain':>10}")
    for row in rows:
        each = row["tokens_a_second"]
        shown = "".join(f"{each[side]:14,.0f}" for side in ("plain", "accelerate", "hpcaccel"))
        print(f"{row['case']:20}{shown}{each['hpcaccel'] / each['plain']:10.3f}")
    return rows


def _shown_checkpoint(found: dict[str, Any]) -> dict[str, Any]:
    print(f"a checkpoint of {found['bytes'] / 1e9:.2f} GB, medians of {found['rounds']} rounds")
    for name, value in found.items():
        if name not in ("bytes", "rounds", "impossible") and name.partition(":")[0] not in found["impossible"]:
            unit = "  " if name.endswith("steps meanwhile") else " s"
            print(f"  {name:60}{value:10.3f}{unit}")
    for name, why in found["impossible"].items():
        print(f"  {name} cannot be measured on this machine: {why}")
    return found


if __name__ == "__main__":
    sys.exit(main())
