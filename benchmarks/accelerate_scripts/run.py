"""Run Accelerate's own test scripts with hpcaccel, on one rank and on two (see docs/migration.md).

    python benchmarks/accelerate_scripts/run.py [--table] [SCRIPT ...]

The scripts are read from the installed wheel; in their imports ``accelerate`` is replaced by ``hpcaccel``, and nothing
else (see ``rank.py``). Nothing is downloaded: see ``hub.py``. The exit code is 1 if a check fails that is not in
``EXPECTED``, if one in ``EXPECTED`` passes, if the number of checks differs from ``CHECKS``, or if a rank fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hub

TIMEOUT_SECONDS = 600
HERE = Path(__file__).parent
SCRIPTS: dict[str, tuple[Sequence[Sequence[str]], Sequence[int]]] = {
    "test_ops.py": ([[]], (1, 2)),
    "test_sync.py": ([[]], (1, 2)),
    "test_script.py": ([[]], (1, 2)),
    "test_distributed_data_loop.py": ([[]], (2,)),
    "test_ddp_comm_hook.py": ([[]], (1, 2)),
    "external_deps/test_metrics.py": ([[]], (1, 2)),
    "external_deps/test_performance.py": ([["--output_dir", "out"]], (1, 2)),
    "external_deps/test_checkpointing.py": (
        [
            ["--output_dir", "out", "--partial_train_epoch", "1"],
            ["--output_dir", "out", "--resume_from_checkpoint", "out/epoch_0"],
        ],
        (1, 2),
    ),
}
"""The arguments of each start, one after the other in one folder, and the number of ranks. The loop over distributed
data asserts that there are two."""

CHECKS = {
    ("test_ops.py", 1): 10,
    ("test_ops.py", 2): 10,
    ("test_sync.py", 1): 3,
    ("test_sync.py", 2): 4,
    ("test_script.py", 1): 17,
    ("test_script.py", 2): 18,
    ("test_distributed_data_loop.py", 2): 11,
    ("test_ddp_comm_hook.py", 1): 10,
    ("test_ddp_comm_hook.py", 2): 10,
    ("external_deps/test_metrics.py", 1): 3,
    ("external_deps/test_metrics.py", 2): 3,
    ("external_deps/test_performance.py", 1): 1,
    ("external_deps/test_performance.py", 2): 1,
    ("external_deps/test_checkpointing.py", 1): 1,
    ("external_deps/test_checkpointing.py", 2): 1,
}
"""Number of checks by script and ranks, as in docs/migration.md: on any rank, if everything that the scripts need is
installed."""

EXPECTED = {
    ("test_ddp_comm_hook.py", 1): r"Default process group has not been initialized",
    ("test_ddp_comm_hook.py", 2): r"device_ids and output_device arguments|BF16 all reduce communication hook required",
}
"""Errors of checks that cannot pass on CPUs. The script's own reference is a DistributedDataParallel on the GPU of
the rank's number, which needs a group even for one rank; torch has the BF16 hooks for NCCL only."""


def run(script: str, ranks: int, starts: Sequence[Sequence[str]]) -> tuple[dict[str, list[str]], list[str]]:
    """The errors of all ranks and starts for each check, and other errors."""
    found: dict[str, list[str]] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="accelerate-scripts-") as name:
        folder = Path(name)
        if script.startswith("external_deps"):
            hub.make(folder)
        (folder / "out").mkdir()
        for arguments in starts:
            codes = _start(script, ranks, arguments, folder)
            for rank, code in enumerate(codes):
                if code:
                    end = (folder / f"{rank}.log").read_text()[-2000:]
                    problems.append(f"rank {rank} ended with {code}:\n{end}")
                for check, entry in _read(folder / f"{rank}.json").items():
                    found.setdefault(check, []).extend(entry["errors"])
    return found, problems


def _start(script: str, ranks: int, arguments: Sequence[str], folder: Path) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "HPCACCEL_"))},
            **({key: str(value) for key, value in place.items()} if ranks > 1 else {}),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "1",
            "HF_HOME": str(folder / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, str(HERE / "rank.py"), script, str(folder / f"{rank}.json"), *arguments]
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        return [process.wait(timeout=TIMEOUT_SECONDS) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def judge(script: str, ranks: int, found: dict[str, list[str]], problems: list[str]) -> list[str]:
    """Deviations from the expected results."""
    expected = EXPECTED.get((script, ranks))
    wrong = [*problems]
    if len(found) != (count := CHECKS[script, ranks]):
        wrong.append(f"{len(found)} checks ran, and docs/migration.md says {count}: {', '.join(found) or 'none'}")
    for check, errors in found.items():
        if expected is None:
            wrong += [f"{check} failed:\n{error}" for error in errors[:1]]
        elif not errors:
            wrong.append(f"{check} passes now: take it out of EXPECTED and out of docs/migration.md")
        else:
            wrong += [f"{check} failed otherwise:\n{error}" for error in errors if not re.search(expected, error)]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"default: all of {', '.join(SCRIPTS)}")
    parser.add_argument("--table", action="store_true", help="print every check, as in docs/migration.md")
    given = parser.parse_args()
    bad = False
    for script in given.scripts or SCRIPTS:
        starts, sizes = SCRIPTS[script]
        for ranks in sizes:
            found, problems = run(script, ranks, starts)
            passed = sum(not errors for errors in found.values())
            wrong = judge(script, ranks, found, problems)
            bad |= bool(wrong)
            verdict = "NOT AS EXPECTED" if wrong else "as expected"
            print(f"{script}, ranks: {ranks}: {passed} of {len(found)} checks pass, {verdict}", flush=True)
            for text in wrong:
                print("    " + text.replace("\n", "\n    "), flush=True)
            for check, errors in found.items() if given.table else ():
                print(f"  {'fails' if errors else 'passes'}  {check}", flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
