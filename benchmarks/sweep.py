"""Sweeps: early stopping compared with random search, 64 killed processes on one journal, reading 10,000 trials; and,
if a Slurm is available, the idle time of the workers of a real sweep.

    python benchmarks/sweep.py [curves] [journal] [reading] [idle]

Exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import sys
from importlib import import_module

PARTS = ("reading", "journal", "curves", "idle")


def main(wanted: list[str]) -> int:
    try:
        import optuna
    except ImportError:
        print("optuna is not installed. Install it with: pip install 'hpcaccel[sweep]'")
        return 1
    if unknown := set(wanted) - set(PARTS):
        print(f"unknown part: {', '.join(sorted(unknown))} (has: {', '.join(PARTS)})")
        return 2
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"optuna {optuna.__version__}")
    passed = []
    for part in PARTS:
        if part in (wanted or PARTS):
            print(flush=True)
            passed.append(import_module(f"sweeps.{part}").main())
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
