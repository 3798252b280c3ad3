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
    port = int(os.environ["MASTER_PORT"])
    gc.freeze()  # else each child's last garbage collection would scan, and copy, all objects of torch
    for script in scripts:
        port += 1  # the previous port may still be closing
        os.environ["MASTER_PORT"] = str(port)
        code = run(script, out, rank)
        (out / f"{script.stem}.{rank}.code").write_text(str(code))
        give_up = time.monotonic() + MEET_SECONDS
        while not all((out / f"{script.stem}.{other}.code").exists() for other in range(size)):
            if time.monotonic() > give_up:
                raise SystemExit(f"{script.name}: not all ranks ended within {MEET_SECONDS} s")
            time.sleep(0.01)


if __name__ == "__main__":
    main()
