"""Records run and sweep directories as this release writes them: ``python tests/data/record_directories.py``.

Real trainings on this machine, without Slurm: one that ran through, the same one stopped half-way, one sharded by FSDP
and stopped, a Python function, and a sweep that was stopped after two of its trials. ``tests/test_recorded.py`` lists,
reports, resumes and continues them, so that directories of earlier releases stay readable. Record again only for a
release whose directories differ, and keep those that are here.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "data" / "recorded"
PROGRAM = RECORDED / "work"
"""The script and the specs."""
MARKS = {"folder": "@FOLDER@", "python": "@PYTHON@", "package": "@PACKAGE@", "host": "@HOST@"}
"""What stands in the recorded files for what belongs to the machine."""
LEFT_OUT = ("lease.json", "__pycache__")
FUNCTION = """\
import hpcaccel, functions
run = hpcaccel.submit(functions.double, 21, spec={"name": "function", "slurm": {"ntasks_per_node": 1}}, cluster="local")
assert run.result() == 42
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="hpcaccel-recorded-") as name:
        work = Path(name) / "work"
        shutil.copytree(PROGRAM, work)
        os.environ.update(XDG_STATE_HOME=f"{name}/state", XDG_CONFIG_HOME=f"{name}/config", HOME=name)
        hpcaccel(work, "submit", "job.yaml", "name=completed")
        hpcaccel(work, "wait", "completed")
        for strategy in ("ddp", "fsdp"):
            run = "stopped" if strategy == "ddp" else "sharded"
            hpcaccel(work, "submit", "job.yaml", f"name={run}", f"runtime.strategy={strategy}", "args.seconds=1.0")
            until(lambda run=run: int(str(status(work, run).get("step") or 0)) >= 7)
            hpcaccel(work, "stop", run)
            hpcaccel(work, "wait", run)
        subprocess.run(
            [sys.executable, "-c", FUNCTION], cwd=work, env={**os.environ, "PYTHONPATH": str(work)}, check=True
        )
        hpcaccel(work, "sweep", "start", "sweep.yaml")
        until(lambda: sum(trial["state"] == "complete" for trial in trials(work)) >= 2)
        hpcaccel(work, "sweep", "stop", "tuned")
        until(lambda: all(trial["state"] != "running" for trial in trials(work)))
        until(lambda: not still_alive(work))
        keep(work / "runs", RECORDED / "runs", name)


def hpcaccel(work: Path, *arguments: str) -> str:
    more = ("--cluster", "local") if {"submit", "start"} & set(arguments[:2]) else ()
    command = [sys.executable, "-m", "hpcaccel", *arguments, *more]
    done = subprocess.run(command, cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 85):
        sys.exit(f"hpcaccel {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def status(work: Path, run: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(hpcaccel(work, "status", run, "--json"))
    return found


def trials(work: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(hpcaccel(work, "sweep", "table", "tuned", "--json"))
    return found


def still_alive(work: Path) -> bool:
    return any((work / "runs").rglob("lease.json"))


def until(holds: object, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        if time.monotonic() > deadline:
            sys.exit("it did not come so far in time")
        time.sleep(0.5)


def keep(runs: Path, target: Path, folder: str) -> None:
    """Copy ``runs``, with marks in place of what belongs to this machine; ``node.pyz`` is the same in all, and kept
    once."""
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(runs, target, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    host = socket.gethostname()
    belongs = {
        folder: MARKS["folder"],
        sys.executable: MARKS["python"],
        str(ROOT): MARKS["package"],
        f"{getpass.getuser()}@{host}": f"ada@{MARKS['host']}",
        f'"{host}"': f'"{MARKS["host"]}"',
    }
    for path in sorted(target.rglob("*")):
        if path.name == "node.pyz" and not path.is_symlink():
            path.replace(target.parent / "node.pyz")
        elif path.is_file() and not path.is_symlink() and path.suffix != ".pkl":
            data = path.read_bytes()
            for one, mark in belongs.items():
                data = data.replace(one.encode(), mark.encode())
            path.write_bytes(data)


if __name__ == "__main__":
    main()
