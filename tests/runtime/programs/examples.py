"""Runs the scripts one after the other, each in its own process: ``examples.py OUT script.py …``.

The processes are forked from one that has imported torch, which saves time. A script's output is in
``OUT/<name>.<rank>``, its exit code in ``OUT/<name>.<rank>.code``; its argument is the directory ``OUT/<name>``.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import time
from pathlib import Path

import torch._dynamo  # imported by the first step of an optimizer
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

from tests.runtime.ranks import free_port

MEET_SECONDS = 90


def run(script: Path, out: Path, rank: int) -> int:
    folder = out / script.stem
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        target = os.open(out / f"{script.stem}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.argv = [str(script), str(folder)]
        runpy.run_path(str(script), run_name="__main__")
        raise SystemExit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    out, scripts = Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gc.freeze()  # else each child's last garbage collection would scan, and copy, all objects of torch
    for script in scripts:
        os.environ["MASTER_PORT"] = common_port(out / f"{script.stem}.port", rank)
        code = run(script, out, rank)
        (out / f"{script.stem}.{rank}.code").write_text(str(code))
        wait_for([out / f"{script.stem}.{other}.code" for other in range(size)])


def common_port(file: Path, rank: int) -> str:
    """A free port, which rank 0 tells the other ranks: the port of the script before may still be closing."""
    if rank == 0:
        part = file.with_suffix(".part")
        part.write_text(str(free_port()))
        part.rename(file)
    wait_for([file])
    return file.read_text()


def wait_for(files: list[Path]) -> None:
    give_up = time.monotonic() + MEET_SECONDS
    while missing := [file.name for file in files if not file.exists()]:
        if time.monotonic() > give_up:
            raise SystemExit(f"no {', '.join(missing)} within {MEET_SECONDS} s: a rank has not come so far")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
