"""The example job on this machine: trains a small GPT, is stopped once in between, and continues by itself.

Runs what a user would type, ``hpcaccel submit jobs/gpt/job.yaml --cluster local --wait``, with its display on this
terminal, and in between ``hpcaccel stop --requeue RUN``. Exits with the exit code of the run, or with 1 if the run did
not continue as expected.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HPCACCEL = [sys.executable, "-m", "hpcaccel"]
STOP_AFTER = 0.4
"""Fraction of the training after which the demo requests a stop."""

LOOK_SECONDS = 2.0


def main() -> int:
    submit = ["submit", "jobs/gpt/job.yaml", "--cluster", "local", "--wait", *sys.argv[1:]]
    runs = Path(os.environ.setdefault("HPCACCEL_RUNS_DIR", str(ROOT / "runs"))) / "gpt"
    before = set(_folders(runs))
    print(f"$ hpcaccel {' '.join(submit)}")
    print(
        f"(at {STOP_AFTER:.0%} of the steps this demo runs `hpcaccel stop --requeue`; the run requeues and continues)"
    )
    sys.stdout.flush()
    waiting = subprocess.Popen([*HPCACCEL, *submit], cwd=ROOT)
    try:
        run, stop = _stop_on_the_way(waiting, runs, before)
        code = waiting.wait()
    except KeyboardInterrupt:
        return waiting.wait()  # it was interrupted too, and prints how to follow the run again
    finally:
        if waiting.poll() is None:
            waiting.send_signal(signal.SIGINT)
    if code != 0 or run is None:
        return code or 1
    return _verdict(run, stop)


def _stop_on_the_way(
    waiting: subprocess.Popen[bytes], runs: Path, before: set[Path]
) -> tuple[str | None, subprocess.CompletedProcess[str] | None]:
    """Request a stop once the new run has done ``STOP_AFTER`` of its steps. Returns the run's id and the command's
    result, or twice None if the run ended before."""
    while waiting.poll() is None:
        time.sleep(LOOK_SECONDS)
        new = sorted(set(_folders(runs)) - before)
        if new and _is_on_its_way(new[-1]):
            run = new[-1].name
            command = [*HPCACCEL, "stop", "--requeue", run]
            return run, subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return None, None


def _folders(runs: Path) -> list[Path]:
    return [path for path in runs.iterdir() if path.is_dir()] if runs.is_dir() else []


def _is_on_its_way(run: Path) -> bool:
    if not (run / "record.json").exists():
        return False
    status = _status(run.name)
    step, total = status["step"], status["total_steps"]
    return bool(step and total and step >= STOP_AFTER * total)


def _status(run: str) -> dict[str, Any]:
    command = [*HPCACCEL, "status", run, "--json"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        sys.exit(f"demo: hpcaccel status {run} failed:\n{answer.stderr}")
    value: dict[str, Any] = json.loads(answer.stdout)
    return value


def _verdict(run: str, stop: subprocess.CompletedProcess[str] | None) -> int:
    status = _status(run)
    if stop is None or stop.returncode != 0:
        print(
            f"demo: the run was not stopped in between: {stop.stderr if stop else 'it ended too early'}",
            file=sys.stderr,
        )
        return 1
    if status["attempts"] != 2 or status["steps_lost"] != 0:
        lost = f"{status['attempts']} attempts, {status['steps_lost']} steps lost"
        print(f"demo: expected 2 attempts and no lost steps, found {lost}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
