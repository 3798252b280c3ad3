"""Records run and sweep directories as this release writes them.

``python tests/data/record_directories.py`` records real trainings on this machine, without Slurm: one that ran to its
end, the same one stopped half-way, one sharded by FSDP and stopped, a Python function, and a sweep that was stopped
after two of its trials. ``python tests/data/record_directories.py preempted`` adds a run that an urgent job preempted
on the development cluster under ``HPCACCEL_TEST_CLUSTER``. ``tests/test_recorded.py`` lists, reports, resumes and
continues them, so that directories of earlier releases stay readable. Record again only for a release whose
directories differ, and keep those that are here.
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
sys.path.insert(0, str(ROOT))
from tests.cluster.dev_cluster import Cluster, Lease  # noqa: E402

RECORDED = ROOT / "tests" / "data" / "recorded"
PROGRAM = RECORDED / "work"
"""The script and the specs."""
MARKS = {"folder": "@FOLDER@", "python": "@PYTHON@", "package": "@PACKAGE@", "host": "@HOST@"}
"""Placeholders in the recorded files for this machine's values."""
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
        if sys.argv[1:] == ["preempted"]:
            record_preempted(work)
            keep(work / "runs" / "preempted", RECORDED / "runs" / "preempted", name)
        else:
            record_local(work)
            for run in sorted((work / "runs").iterdir()):
                keep(run, RECORDED / "runs" / run.name, name)
            shutil.copy2(next((work / "runs").glob("*/*/node.pyz")), RECORDED / "node.pyz")


def record_local(work: Path) -> None:
    hpcaccel(work, "submit", "job.yaml", "name=completed", "--cluster", "local")
    hpcaccel(work, "wait", "completed")
    for strategy in ("ddp", "fsdp"):
        run = "stopped" if strategy == "ddp" else "sharded"
        options = (f"name={run}", f"runtime.strategy={strategy}", "args.seconds=1.0", "--cluster", "local")
        hpcaccel(work, "submit", "job.yaml", *options)
        until(lambda run=run: int(str(status(work, run).get("step") or 0)) >= 7)
        hpcaccel(work, "stop", run)
        hpcaccel(work, "wait", run)
    subprocess.run([sys.executable, "-c", FUNCTION], cwd=work, env={**os.environ, "PYTHONPATH": str(work)}, check=True)
    hpcaccel(work, "sweep", "start", "sweep.yaml", "--cluster", "local")
    until(lambda: sum(trial["state"] == "complete" for trial in trials(work)) >= 2)
    hpcaccel(work, "sweep", "stop", "tuned")
    until(lambda: all(trial["state"] != "running" for trial in trials(work)))
    until(lambda: not still_alive(work))


def record_preempted(work: Path) -> None:
    """A job of the partition ``urgent`` takes the run's node for a moment; Slurm requeues the run."""
    cluster = Cluster.at(Path(os.environ["HPCACCEL_TEST_CLUSTER"]))
    os.environ.update({name: cluster.env[name] for name in ("PATH", "SLURM_CONF")}, HPCACCEL_QUEUE_SECONDS="0")
    lease = Lease.take(cluster, 1)
    try:
        slurm = ("slurm.partition=gpu", "slurm.gpus_per_node=2", "slurm.mem=4G", f"slurm.nodelist={lease.nodes[0]}")
        hpcaccel(work, "submit", "job.yaml", "name=preempted", "args.seconds=1.0", f"python={sys.executable}", *slurm)
        until(lambda: int(str(status(work, "preempted").get("step") or 0)) >= 7)
        urgent = ("--partition=urgent", "--exclusive", "--gpus-per-node=2", "--time=1", "--output=/dev/null")
        cluster.sbatch(*urgent, f"--nodelist={lease.nodes[0]}", "--wrap=sleep 1")
        hpcaccel(work, "wait", "preempted")
        until(lambda: not still_alive(work))
    finally:
        lease.release()


def hpcaccel(work: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "hpcaccel", *arguments]
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


def until(holds: object, seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        if time.monotonic() > deadline:
            sys.exit(f"a recording step did not finish within {seconds:.0f} s")
        time.sleep(0.5)


def keep(runs: Path, target: Path, folder: str) -> None:
    """Copy ``runs`` with placeholders for this machine's values; ``node.pyz``, the same in all, is kept once beside
    them."""
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
            path.unlink()
        elif path.is_file() and not path.is_symlink() and path.suffix != ".pkl":
            data = path.read_bytes()
            for one, mark in belongs.items():
                data = data.replace(one.encode(), mark.encode())
            path.write_bytes(data)


if __name__ == "__main__":
    main()
