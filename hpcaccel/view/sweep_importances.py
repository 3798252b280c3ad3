"""Importances of a sweep's parameters, computed in a child process: programs that watch sweeps import no Optuna."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.sweeps.analysis import FEWEST, importances, rungs
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.sweep_overview import Study

__all__ = ["kept_importances"]

TIMEOUT_SECONDS = 60.0
GROWTH = 1.1
"""The importances are computed again when the number of ended trials has grown by this factor."""

_lock = threading.Lock()
_kept: dict[Path, tuple[int, dict[str, float]]] = {}
"""Number of ended trials, and the importances computed from them, by sweep."""
_computing: dict[Path, threading.Thread] = {}


def kept_importances(sweep: SweepDir, trials: Sequence[TrialRecord], *, wait: bool) -> dict[str, float]:
    """The newest known importances, by parameter, largest first; empty if there are none yet.

    Args:
        wait: whether to wait for the child process if the known ones are outdated.
    """
    ended = sum(trial.state in ("complete", "pruned") for trial in trials)
    with _lock:
        known, shares = _kept.get(sweep.path, (0, {}))
        if ended < FEWEST or ended < known * GROWTH:
            return shares
        thread = _computing.get(sweep.path)
        if thread is None:
            thread = threading.Thread(target=_compute, args=(sweep.path, ended), daemon=True)
            _computing[sweep.path] = thread
            thread.start()
    if wait:
        thread.join()
    with _lock:
        return _kept.get(sweep.path, (0, {}))[1]


def _compute(path: Path, ended: int) -> None:
    shares: dict[str, float] = {}
    try:
        command = [sys.executable, "-m", __name__, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        if done.returncode == 0:
            shares = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        shares = {}  # a view without importances; the next ones are computed when more trials have ended
    finally:
        with _lock:
            _kept[path] = (ended, shares)
            _computing.pop(path, None)


def main() -> None:
    """Print the importances of the sweep in the directory that is the first argument, as JSON."""
    sweep = SweepDir(sys.argv[1])
    trials = Study(sweep).read().trials
    shares = importances(sweep, trials, rungs(sweep, trials)).shares
    print(json.dumps(dict(shares)))


if __name__ == "__main__":
    main()
