"""Measure ``from hpcaccel import Accelerator`` in a program that has imported torch, compared with Accelerate.

Fresh processes take turns; each imports torch first, then measures one import. Exits with 1 if the limit is
exceeded.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys

LIMIT_SECONDS = 0.020
IMPORTS = {
    "import hpcaccel": "import hpcaccel",
    "from hpcaccel import Accelerator": "from hpcaccel import Accelerator",
    "from accelerate import Accelerator": "from accelerate import Accelerator",
}
PROGRAM = """
import time
import torch
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
        print("accelerate is not installed and is not measured. Install it with: pip install 'hpcaccel[bench]'")
        del imports["from accelerate import Accelerator"]
    seconds: dict[str, list[float]] = {name: [] for name in imports}
    for turn in range(turns + 1):
        for name, statement in imports.items():
            took = _timed(statement)
            if turn:  # the first turn compiles and fills the caches
                seconds[name].append(took)
    passed = True
    print(f"{'after torch':36}{'median':>10}{'fastest':>10}{'limit':>10}")
    for name, measured in seconds.items():
        ours = "hpcaccel" in name
        median = statistics.median(measured)
        within = not ours or median <= LIMIT_SECONDS
        passed = passed and within
        limit = f"{LIMIT_SECONDS * 1000:.0f} ms" if ours else ""
        shown = f"{median * 1000:7.1f} ms{min(measured) * 1000:7.1f} ms{limit:>10}"
        print(f"{name:36}{shown}{'' if within else '  too slow'}")
    return 0 if passed else 1


def _timed(statement: str) -> float:
    program = PROGRAM.format(statement)
    ended = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    return float(ended.stdout)


if __name__ == "__main__":
    sys.exit(main())
