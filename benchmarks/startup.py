"""Measure the start-up time of the command line, as a multiple of ``python -c pass`` in the same run.

The commands take turns, so that a machine that slows down in between slows all of them, and the median of the turns
counts. Completions are those that bash asks for at a press of the tab key, with 200 runs. Where Python starts in 20 ms,
their limit is 100 ms, which users begin to notice. One line shows what the libraries that ``render`` needs take alone,
for a model of one field and without a template. Exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hpcaccel

TURNS = 21
RUNS = 200
COMPLETIONS = {
    "of a command": "hpcaccel sta",
    "of a run": "hpcaccel status g",
    "of a key": "hpcaccel submit job.yaml slurm.par",
}
LEAN_PYDANTIC = Path(hpcaccel.__file__).with_name("spec") / "lean_pydantic.py"
LIBRARIES = f"""\
import atexit, gc
gc.set_threshold(100_000)  # as in hpcaccel.__main__
atexit.register(gc.freeze)
exec(open({str(LEAN_PYDANTIC)!r}).read())  # not imported, because its package imports the models of a job
with without_plugins():
    from pydantic import BaseModel
    class Model(BaseModel):
        name: str
import jinja2, yaml
Model.model_validate(yaml.load("name: startup", Loader=yaml.CSafeLoader))
jinja2.Environment()
"""

_INSTALLED = Path(sys.executable).with_name("hpcaccel")
HPCACCEL = [sys.executable, str(_INSTALLED)] if _INSTALLED.exists() else [sys.executable, "-m", "hpcaccel"]

SPEC = """\
name: startup
entrypoint: {command: ["true"]}
slurm: {nodes: 2, ntasks_per_node: 2, time: "10:00"}
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "job.yaml"
        spec.write_text(SPEC)
        _make_runs(Path(folder) / "runs")
        commands: dict[str, tuple[list[str], dict[str, str], float | None]] = {
            "python -c pass": ([sys.executable, "-c", "pass"], {}, None),
            "hpcaccel --help": ([*HPCACCEL, "--help"], {}, 5.0),
            "PyYAML, pydantic, Jinja": ([sys.executable, "-c", LIBRARIES], {}, None),
            "hpcaccel render job.yaml": ([*HPCACCEL, "render", str(spec)], {}, 12.0),
        }
        for name, line in COMPLETIONS.items():
            words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
            commands[f"completion {name}"] = (HPCACCEL, {**words, "_HPCACCEL_COMPLETE": "complete_bash"}, 5.0)
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(TURNS + 1):
            for name, (command, variables, _) in commands.items():
                took = _timed(command, folder, variables)
                if turn:  # the first turn fills the caches
                    seconds[name].append(took)
    return _report(seconds, {name: limit for name, (*_, limit) in commands.items()})


def _make_runs(runs: Path) -> None:
    """Folders that completion takes for runs."""
    for number in range(RUNS):
        run = runs / f"gpt-{number % 20}" / f"20260101-{number:06}-abcd"
        run.mkdir(parents=True)
        (run / "record.json").touch()


def _timed(command: list[str], folder: str, variables: dict[str, str]) -> float:
    own = {"XDG_STATE_HOME": folder, "XDG_CONFIG_HOME": folder, "HPCACCEL_RUNS_DIR": f"{folder}/runs"}
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **own, **variables})
    return time.perf_counter() - begin


def _report(seconds: dict[str, list[float]], limits: dict[str, float | None]) -> int:
    baseline = statistics.median(seconds["python -c pass"])
    passed = True
    print(f"{'':26}{'median':>10}{'multiple':>11}{'limit':>8}")
    for name, measured in seconds.items():
        median = statistics.median(measured)
        limit = limits[name]
        within = limit is None or median <= limit * baseline
        passed = passed and within
        shown = "" if limit is None else f"{limit:.0f} ×"
        missed = "" if within or limit is None else f"  missed by {median / baseline - limit:.1f} ×"
        print(f"{name:26}{median * 1000:7.1f} ms{median / baseline:9.1f} ×{shown:>8}{missed}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
