"""Checks the table of names row by row, on any number of ranks.

    torchrun --nproc-per-node 2 names.py OUT [ROW ...]        srun --ntasks 4 python names.py OUT

Each rank writes ``OUT/<rank>.jsonl``, one line per row: the error, or null. After each row the ranks synchronise
through files in OUT, so that a row that fails on some ranks does not affect the next one.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import table
from table import data, place, saving, setup, together, training  # noqa: F401

MEET_SECONDS = 60


def place_of_this_process() -> tuple[int, int]:
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def meet(out: Path, name: str, rank: int, size: int) -> None:
    (out / f"{name}.{rank}").touch()
    give_up = time.monotonic() + MEET_SECONDS
    while time.monotonic() < give_up:
        if all((out / f"{name}.{other}").exists() for other in range(size)):
            return
        time.sleep(0.005)
    raise SystemExit(f"rank {rank} waited {MEET_SECONDS} s for the others at row {name}")


def check(name: str, folder: Path) -> str | None:
    """The traceback of a row's error, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            table.ROWS[name](folder)
    except Exception:
        return traceback.format_exc()
    finally:
        table.end_all()
    return None


def main() -> None:
    out = Path(sys.argv[1])
    rank, size = place_of_this_process()
    with open(out / f"{rank}.jsonl", "w", buffering=1) as lines:
        for number, name in enumerate(sys.argv[2:] or table.ROWS):
            folder = out / str(number)
            folder.mkdir(exist_ok=True)
            began = time.monotonic()
            wrong = check(name, folder)
            seconds = round(time.monotonic() - began, 2)
            print(json.dumps({"row": name, "wrong": wrong, "seconds": seconds}), file=lines)
            meet(out, f"met-{number}", rank, size)


if __name__ == "__main__":
    main()
