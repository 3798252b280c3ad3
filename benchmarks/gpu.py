"""Checks and measurements that need a GPU.

Checks NCCL, bf16, fp16 and fp8, CUDA's random state in bit-exact resumes, out of memory, the preflight. Measures the
cost of a step and its synchronisations with the GPU, the throughput of ``jobs/gpt``, and how long a checkpoint blocks
the training, compared with plain PyTorch, DCP and Accelerate in the same run. Prints tables and writes JSON. Without a
GPU it lists the checks and measurements. Exits with 1 if a check fails.
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
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
        return _say_what_it_would_do()
    found: dict[str, Any] = {"machine": _machine()}
    print(json.dumps(found["machine"]), flush=True)
    parts: dict[str, Callable[[], Any]] = {
        "checks": lambda: _checks(rehearse=options.rehearse),
        "step": lambda: _shown_steps(speed.step(11 if options.rehearse else 20 * options.rounds + 1)),
        "throughput": lambda: _shown_throughput(speed.throughput(options.rounds, rehearse=options.rehearse)),
        "checkpoint": lambda: _shown_checkpoint(speed.checkpoint(options.rounds, layers=options.layers)),
    }
    failed = False
    for name, part in parts.items():
        if options.only and name not in options.only:
            continue
        begin = time.monotonic()
        try:
            found[name] = part()
        except checks.Failed as error:
            found[name] = {"failed": str(error)}
            print(f"{name} FAILED: {error}")
        failed = failed or "failed" in json.dumps(found[name])
        print(f"({name}: {time.monotonic() - begin:.0f} s)", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if failed else 0


def _say_what_it_would_do() -> int:
    print("this machine has no GPU. With a GPU this program checks:")
    for name, check in checks.CHECKS.items():
        print(f"  {name:18}{(check.__doc__ or '').strip().splitlines()[0]}")
    print("and measures:")
    for part in (speed.step, speed.throughput, speed.checkpoint):
        print(f"  {part.__name__:18}{(part.__doc__ or '').strip().splitlines()[0]}")
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
