"""Measure ``from hpcaccel import Accelerator`` in a program that has imported torch, compared with Accelerate.

Fresh processes take turns; each imports torch and collects its garbage first, then measures one import. A collection
of torch's objects takes longer than the imports, and would fall into one of them by chance. Exits with 1 if the limit,
a share of Accelerate's median, is exceeded.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys

LIMIT = 0.5
"""Largest share of Accelerate's time."""
IMPORTS = {
    "import hpcaccel": "import hpcaccel",
    "from hpcaccel import Accelerator": "from hpcaccel import Accelerator",
    "from accelerate import Accelerator": "from accelerate import Accelerator",
}
PROGRAM = """
import gc
import time
import torch
gc.collect()
begin = time.perf_counter()
{}
print(time.perf_counter() - begin)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=11)
    turns = parser.parse_args().turns
    imports = dict(IMPORTS)
    if importlib.util.find_spec("accelerate") is None:
        print("accelerate is not installed. Install it with: pip install 'hpcaccel[bench]'")
        return 1
    seconds: dict[str, list[float]] = {name: [] for name in imports}
    for turn in range(turns + 1):
        for name, statement in imports.items():
            took = _timed(statement)
            if turn:  # the first turn compiles and fills the caches
                seconds[name].append(took)
    passed = True
    theirs = statistics.median(seconds["from accelerate import Accelerator"])
    print(f"{'after torch':36}{'median':>10}{'fastest':>10}{'share':>8}{'limit':>8}")
    for name, measured in seconds.items():
        ours = "hpcaccel" in name
        share = statistics.median(measured) / theirs
        within = not ours or share <= LIMIT
        passed = passed and within
        shown = f"{statistics.median(measured) * 1000:7.1f} ms{min(measured) * 1000:7.1f} ms{share:8.2f}"
        print(f"{name:36}{shown}{LIMIT if ours else '':>8}{'' if within else '  too slow'}")
    return 0 if passed else 1


def _timed(statement: str) -> float:
    program = PROGRAM.format(statement)
    ended = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    return float(ended.stdout)


if __name__ == "__main__":
    sys.exit(main())
