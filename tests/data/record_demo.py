"""Records the runs of ``serve --demo``: ``python tests/data/record_demo.py`` writes hpcaccel/service/demo_runs.tar.xz.

All of them are real trainings of ``demo_work/train.py`` on this machine, without Slurm: one that was requeued and
completed, one whose rank 1 fails, one that was stopped, one whose rank 1 hangs, a copy of one that was running, and a
sweep with pruned trials. Paths, host and user are replaced, of the installed packages only those of ``PACKAGES`` are
kept, and the tensors of checkpoints are replaced by zeros. Takes some minutes.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "data" / "demo_work"
TARGET = ROOT / "hpcaccel" / "service" / "demo_runs.tar.xz"
HOME = "/home/demo"
LEFT_OUT = ("lease.json", "__pycache__", "node.pyz", "submitit", "*.claim", "sampler.log")
PACKAGES = ("hpcaccel", "numpy", "torch")
SLOW = ("args.slow=0.15", "args.lr=0.02")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="hpcaccel-demo-") as name:
        work, kept = Path(name) / "work", Path(name) / "kept"
        shutil.copytree(PROGRAM, work, ignore=shutil.ignore_patterns("__pycache__"))
        os.environ.update(XDG_STATE_HOME=f"{name}/state", XDG_CONFIG_HOME=f"{name}/config", HOME=name)
        os.environ["PYTHONPATH"] = str(ROOT)
        record(work, kept)
        scrub(kept, name)
        pack(kept)
    print(f"{TARGET}: {TARGET.stat().st_size / 1000:.0f} kB")


def record(work: Path, kept: Path) -> None:
    """Run everything, and copy the run directories to ``kept``."""
    submit(work, "text-small")
    hpcaccel(work, "sweep", "start", "sweep.yaml", "--cluster", "local")
    until(lambda: step_of(work, "text-small") >= 150)
    hpcaccel(work, "stop", "--requeue", "text-small")
    submit(work, "text-wide", "args.width=24")
    until(lambda: step_of(work, "text-wide") >= 170)
    hpcaccel(work, "stop", "text-wide")
    hpcaccel(work, "wait", "text-small")
    submit(work, "text-hang", "args.fault=hang", "resilience.hang_timeout_seconds=12", "resilience.restart_in_place=0")
    submit(work, "text-small", "args.fault=crash", "args.lr=0.03")
    hpcaccel(work, "wait", "text-hang")
    hpcaccel(work, "wait", "text-small")
    until(lambda: not any((work / "runs" / "text-search").rglob("lease.json")))
    submit(work, "text-live", *SLOW)
    until(lambda: step_of(work, "text-live") >= 220)
    shutil.copytree(work / "runs", kept, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (kept / "recorded.json").write_text(json.dumps({"recorded": time.time()}))
    hpcaccel(work, "cancel", "text-live")
    until(lambda: not any((work / "runs").rglob("lease.json")))


def submit(work: Path, name: str, *overrides: str) -> None:
    hpcaccel(work, "submit", "job.yaml", f"name={name}", *overrides, "--cluster", "local")


def step_of(work: Path, run: str) -> int:
    return int(json.loads(hpcaccel(work, "status", run, "--json")).get("step") or 0)


def hpcaccel(work: Path, *arguments: str) -> str:
    print("hpcaccel", *arguments, flush=True) if arguments[0] != "status" else None
    command = [sys.executable, "-m", "hpcaccel", *arguments]
    done = subprocess.run(command, cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1, 85):  # 1: a run that failed, as it is meant to; 85: one that was stopped
        sys.exit(f"hpcaccel {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def until(holds: Callable[[], bool], seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            sys.exit(f"a recording step did not finish within {seconds:.0f} s")
        time.sleep(1)


def scrub(kept: Path, folder: str) -> None:
    """Replace paths, host and user of this machine in all files and their names.

    Raises:
        SystemExit: something of them is left.
    """
    host, user = socket.gethostname(), getpass.getuser()
    paths = {folder: HOME, str(ROOT): f"{HOME}/hpcaccel", sys.prefix: f"{HOME}/venv"}
    paths[sys.executable] = f"{HOME}/venv/bin/python"
    words = re.compile(rf"(?<![\w/]){re.escape(host)}\b|\blocalhost\b".encode())
    for path in sorted(kept.rglob("*"), reverse=True):
        if path.is_file():
            path.write_bytes(bytes(path.stat().st_size) if path.suffix == ".bin" else path.read_bytes())
            data = path.read_bytes()
            for one in sorted(paths, key=len, reverse=True):
                data = data.replace(one.encode(), paths[one].encode())
            path.write_bytes(words.sub(b"n1", data.replace(f"{user}@".encode(), b"demo@")))
            if path.name == "record.json":
                fewer_packages(path)
            for mark in (*paths, str(ROOT.parent), host + "."):
                if mark.encode() in path.read_bytes():
                    sys.exit(f"{path}: {mark} is left")
        if path.stem == host:
            path.rename(path.with_name("n1" + path.suffix))


def fewer_packages(path: Path) -> None:
    record = json.loads(path.read_text())
    if "packages" in record:
        record["packages"] = {name: value for name, value in record["packages"].items() if name in PACKAGES}
        path.write_text(json.dumps(record))


def pack(kept: Path) -> None:
    with tarfile.open(TARGET, "w:xz", preset=9) as packed:
        for path in sorted(kept.rglob("*")):
            if path.is_file():
                entry = tarfile.TarInfo(path.relative_to(kept).as_posix())  # without this machine's user
                entry.size = path.stat().st_size
                with path.open("rb") as file:
                    packed.addfile(entry, file)


if __name__ == "__main__":
    main()
