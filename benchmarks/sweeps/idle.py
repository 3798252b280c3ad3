"""Measure the share of their allocations in which the workers of a real sweep have no live rank process.

The sweep is that of ``jobs/gpt`` with 24 trials and 4 workers, on the available Slurm (``eval "$(docker/cluster
env)"``), without interruptions. A rank is alive from the report of its Slurm step until its supervisor sees its exit,
or, more strictly, until its last output, after which only Python's shutdown remains.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.sweeps.compute_account import ComputeAccount, Held
from hpcaccel.sweeps.journal_notes import OwnershipNotes
from hpcaccel.sweeps.journal_reader import StudyRecord

SPEC = Path(__file__).parents[2] / "jobs" / "gpt" / "sweep.yaml"
LONGER = ("args.epochs=6", "sweep.pruner.asha.min_steps=120")
"""Trials of two minutes or so, workers of seven: as it stands, the example is over in two, and a part of that is the
start of the workers. What a start and a change of trials take is printed, for other lengths."""
LIMIT = 0.02


def main() -> bool:
    if not shutil.which("sinfo") or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        print("idle: skipped, because Slurm does not respond on this machine")
        return True
    with tempfile.TemporaryDirectory(prefix="hpcaccel-idle-") as folder:
        sweep = _run(Path(folder))
        share = _measure(sweep, until_last_word=False)
        strict = _measure(sweep, until_last_word=True)
    print(f"idle, no rank process alive: {share:.2%} of the allocations; until the ranks' last output: {strict:.2%}")
    print(f"limit {LIMIT:.0%}: {'kept' if share < LIMIT else 'EXCEEDED'}")
    return share < LIMIT


def _run(folder: Path) -> SweepDir:
    hpcaccel = [sys.executable, "-m", "hpcaccel"]
    start = [*hpcaccel, "sweep", "start", str(SPEC), *LONGER, f"environment.python={sys.executable}"]
    words = ["--cluster", "slurm", "--runs-dir", str(folder), "--wait", "--json"]
    answer = subprocess.run([*start, *words], stdout=subprocess.PIPE, text=True, check=True)
    status = json.loads(answer.stdout)
    print(f"{status['trials']}, workers {status['workers']}, {status['gpu_hours']:.3f} GPU-hours")
    return SweepDir(status["path"])


def _measure(sweep: SweepDir, *, until_last_word: bool) -> float:
    """Share of all workers' allocations in which none of their ranks was alive."""
    owners = OwnershipNotes(StudyRecord(sweep.journal)).read().claims
    held = idle = 0.0
    for worker, stays in ComputeAccount(sweep).read().held.items():
        mine = [sweep.trial(number) for number, claim in owners.items() if claim.worker == worker]
        lives = sorted(life for run in mine for life in _lives(run, until_last_word=until_last_word))
        for stay in stays:
            seconds = stay.seen - stay.began
            gaps = _gaps(lives, stay)
            print(f"  worker {worker}: {seconds:.1f} s, first rank after {gaps[0]:.1f} s, then {_told(gaps[1:])}")
            held, idle = held + seconds, idle + sum(gaps)
    return idle / held


def _lives(run: RunDir, *, until_last_word: bool) -> Iterator[tuple[float, float]]:
    for line, _ in read_lines(run.ledger):
        if line["event"] == "end":
            born = (run.attempt(line["attempt"]) / "step.json").stat().st_mtime
            died = run.outcome(line["attempt"]).stat().st_mtime if until_last_word else line["time"]
            yield born, died


def _gaps(lives: list[tuple[float, float]], stay: Held) -> list[float]:
    inside = [life for life in lives if stay.began <= life[0] <= stay.seen]
    deaths = [stay.began, *(died for _, died in inside)]
    births = [*(born for born, _ in inside), stay.seen]
    return [max(0.0, born - died) for died, born in zip(deaths, births, strict=True)]


def _told(gaps: list[float]) -> str:
    return f"{len(gaps)} gaps, the longest {max(gaps, default=0.0):.2f} s, {sum(gaps):.2f} s in all"


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
