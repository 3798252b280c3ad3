"""Measure the time from ``sbatch`` to the first optimizer step, compared with a plain script under ``srun``.

Both are submitted in turns to the same Slurm, on the same node with two ranks: the development cluster, which the
program starts (``docker/cluster``; root on Debian), or the one in ``HPCACCEL_TEST_CLUSTER``. An ``sbatch`` in front of
Slurm's notes when it is called, so that both are measured from there. It first sleeps for up to a second at random:
the wait for Slurm depends on the moment, and submissions at a fixed time after the job before have differed by 0.7 s in
the median. Prints medians of the parts, and exits with 1 if hpcaccel takes more than ``MOST`` times as long.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MOST = 1.15
RANKS = 2
SECONDS = 600.0
"""Most time that a job may take."""
HERE = Path(__file__).resolve().parent
CLUSTER = HERE.parent / "docker" / "cluster"
PROGRAM = HERE / "first_step" / "train.py"
PARTS = {
    "submitted → batch script": ("submitted", "script"),
    "batch script → rank": ("script", "begun"),
    "rank: imports": ("begun", "imported"),
    "rank: group": ("imported", "formed"),
    "rank: first step": ("formed", "stepped"),
    "sbatch → first step": ("submitted", "stepped"),
}
SBATCH = """\
#!/bin/bash
sleep "0.$(printf %05d "$((RANDOM * 3))")"
date +%s.%N > "$FIRST_STEP_SUBMITTED"
exec {sbatch} "$@"
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    given = os.environ.get("HPCACCEL_TEST_CLUSTER")
    if not given and subprocess.run([CLUSTER, "check"], capture_output=True, check=False).returncode:
        print("not measured: the development cluster cannot be started on this machine (docker/cluster check)")
        return 0
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="hpcaccel-first-step-") as folder:
        Path(folder).chmod(0o755)  # munge refuses a socket in a folder that others cannot enter
        root = Path(given) if given else Path(folder) / "cluster"
        if not given:
            subprocess.run([CLUSTER, "up", "--root", root, "--nodes", "1"], check=True, stdout=subprocess.DEVNULL)
        try:
            return _report(_in_turns(Path(folder), _environment(root, Path(folder)), rounds))
        finally:
            if not given:
                subprocess.run([CLUSTER, "down", "--root", root], check=True, stdout=subprocess.DEVNULL)


def _environment(root: Path, folder: Path) -> dict[str, str]:
    """The environment of a login shell of the cluster, with the ``sbatch`` that notes when it is called."""
    exports = subprocess.run([CLUSTER, "env", "--root", root], capture_output=True, text=True, check=True).stdout
    pairs = [shlex.split(line)[1].partition("=") for line in exports.splitlines()]
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    environment = {**outside, **{name: value.replace("$PATH", os.environ["PATH"]) for name, _, value in pairs}}
    programs = folder / "bin"
    programs.mkdir()
    real = shutil.which("sbatch", path=environment["PATH"])
    (programs / "sbatch").write_text(SBATCH.format(sbatch=real))
    (programs / "sbatch").chmod(0o755)
    state = {"XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")}
    return {**environment, **state, "PATH": f"{programs}:{environment['PATH']}", "OMP_NUM_THREADS": "1"}


def _in_turns(folder: Path, environment: dict[str, str], rounds: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {"plain": [], "hpcaccel": []}
    for number in range(rounds + 1):
        for side, submit in (("plain", _submit_plain), ("hpcaccel", _submit_ours)):
            turn = folder / f"{side}-{number}"
            turn.mkdir()
            env = {**environment, "FIRST_STEP_SUBMITTED": str(turn / "submitted")}
            job = submit(turn, env)
            times = _times(turn)
            _wait_for_end(job, env)
            if number:  # the first turn fills the caches
                found[side].append(times)
    return found


def _submit_plain(turn: Path, env: dict[str, str]) -> str:
    script = turn / "job.sh"
    program = shlex.join([sys.executable, str(PROGRAM), str(turn / "times.json")])
    script.write_text(f"#!/bin/bash -l\ndate +%s.%N > {turn}/script\nsrun {program}\n")
    options = ["--parsable", f"--ntasks={RANKS}", "--nodes=1", "--cpus-per-task=1", "--mem=4G", "--time=10",
               f"--output={turn}/log", f"--chdir={turn}", "--export=NONE"]  # fmt: skip
    ended = subprocess.run(["sbatch", *options, script], env=env, capture_output=True, text=True, check=True)
    return ended.stdout.strip().partition(";")[0]


def _submit_ours(turn: Path, env: dict[str, str]) -> str:
    spec = {
        "name": "first-step",
        "entrypoint": {"script": str(PROGRAM), "args": [str(turn / "times.json"), "--hpcaccel"]},
        "environment": {"python": sys.executable, "setup": [f"date +%s.%N > {turn}/script"],
                        "env": {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}},
        "slurm": {"nodes": 1, "ntasks_per_node": RANKS, "cpus_per_task": 1, "mem": "4G", "time": 10},
    }  # fmt: skip
    file = turn / "job.yaml"
    file.write_text(json.dumps(spec))
    command = [sys.executable, "-m", "hpcaccel", "submit", str(file), "--json", "--runs-dir", str(turn / "runs")]
    ended = subprocess.run(command, env=env, cwd=turn, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"hpcaccel submit ended with {ended.returncode}: {ended.stderr}")
    return str(json.loads(ended.stdout)["job_id"])


def _times(turn: Path) -> dict[str, float]:
    """When a job reached each point, in seconds since the epoch."""
    path, deadline = turn / "times.json", time.monotonic() + SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"{turn.name}: no step after {SECONDS:.0f} s")
        time.sleep(0.05)
    times: dict[str, float] = json.loads(path.read_text())
    return times | {name: float((turn / name).read_text()) for name in ("submitted", "script")}


def _wait_for_end(job: str, env: dict[str, str]) -> None:
    deadline = time.monotonic() + SECONDS
    command = ["squeue", "--noheader", "--jobs", job, "--states=all", "--format=%T"]
    while time.monotonic() < deadline:
        state = subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout.split()
        if not state or state[0] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
            return
        time.sleep(0.2)
    sys.exit(f"job {job} did not end within {SECONDS:.0f} s")


def _report(found: dict[str, list[dict[str, float]]]) -> int:
    print(f"{'median':28}{'plain srun':>12}{'hpcaccel':>12}{'ratio':>9}{'limit':>8}")
    ratio = 0.0
    for part, (first, last) in PARTS.items():
        medians = [statistics.median(turn[last] - turn[first] for turn in found[side]) for side in found]
        ratio = medians[1] / medians[0]
        is_whole = part == list(PARTS)[-1]
        missed = f"  missed by {ratio - MOST:.2f}" if is_whole and ratio > MOST else ""
        limit = f"{MOST:8.2f}" if is_whole else ""
        print(f"{part:28}{medians[0]:10.2f} s{medians[1]:10.2f} s{ratio:9.2f}{limit}{missed}")
    return 0 if ratio <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
