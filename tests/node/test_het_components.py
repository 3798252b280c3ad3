"""Tests of components (programs beside the ranks) on the local backend, with real processes and signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from hpcaccel.core.launch_spec import read_launch
from hpcaccel.core.process_identity import process_start
from hpcaccel.node.launchers.het_components import component_nodes

from .conftest import LocalRun

Make = Callable[..., LocalRun]

SERVE = """
import os, signal, time
print("serving", os.environ["HPCACCEL_COMPONENT_PROCESS"], os.environ["HPCACCEL_NODES"], os.getpid(), flush=True)
print(*(name for name in ("RANK", "MASTER_ADDR", "HPCACCEL_RUN_DIR") if name in os.environ), flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("the ranks have ended", flush=True)
"""
WAITS = """
import json, os, pathlib, time
run = pathlib.Path(os.environ["HPCACCEL_RUN_DIR"])
data = json.loads((run / "spec.json").read_text())["launch"]["components"][0]
attempt = run / "attempts" / os.environ["HPCACCEL_ATTEMPT"]
for process in range(data["processes_per_node"]):
    log = attempt / f"data-{process}.log"
    while not (log.exists() and "serving" in log.read_text()):
        time.sleep(0.02)
print("ready", os.environ["HPCACCEL_NODES_DATA"], flush=True)
"""


def beside(folder: Any, program: str, *, processes: int = 1) -> dict[str, Any]:
    script = folder / "serve.py"
    script.write_text(program)
    data = {"name": "data", "program": ["{python}", str(script)], "nodes": 1, "processes_per_node": processes}
    return {"components": [{**data, "srun": []}]}


def logs(run: LocalRun, attempt: int = 1) -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted(run.dir.attempt(attempt).glob("data-*.log"))]


def test_component_is_ended_after_the_ranks(local_run: Make, tmp_path: Any) -> None:
    run = local_run(WAITS, launch=beside(tmp_path, SERVE, processes=2))
    assert run.run() == 0
    assert run.ends == [("completed", "end")]
    said = logs(run)
    assert [lines[0].split()[:3] for lines in said] == [["serving", "0", "localhost"], ["serving", "1", "localhost"]]
    assert said[0][1:] == ["", "the ranks have ended"], "it is no rank, and must not pass for one"
    assert all(process_start(int(lines[0].split()[3])) is None for lines in said)


def test_component_that_ignores_sigint_is_killed(local_run: Make, tmp_path: Any) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SERVE
    run = local_run(WAITS, launch=beside(tmp_path, deaf))
    assert run.run() == 0
    assert process_start(int(logs(run)[0][0].split()[3])) is None


def test_sigterm_of_a_preemption_does_not_end_a_component(local_run: Make, tmp_path: Any) -> None:
    """Slurm signals all processes of a job at once, and ranks that are saving may still need the component."""
    waits = WAITS + "time.sleep(1 if os.environ['HPCACCEL_ATTEMPT'] == '2' else 600)\n"
    run = local_run(waits, launch={**beside(tmp_path, SERVE), "stop": "signals"})
    run.start()
    run.wait_for("ready")
    os.kill(int(logs(run)[0][0].split()[3]), signal.SIGTERM)
    run.ask("requeue")
    assert run.wait() == 0
    assert [reason for reason, _ in run.ends] == ["stop", "completed"]
    assert [lines[0][-1] for lines in (logs(run), logs(run, 2))] == ["the ranks have ended"] * 2


def test_failed_component_fails_the_attempt(local_run: Make, tmp_path: Any) -> None:
    fails = (
        "import os, sys, time\nprint('serving', flush=True)\n"
        "if os.environ['HPCACCEL_NODES'] and not os.path.exists('again'):\n"
        "    open('again', 'w').close(); time.sleep(0.5); print('no more data'); sys.exit(3)\n" + SERVE
    )
    waits = WAITS + "time.sleep(0 if os.environ['HPCACCEL_ATTEMPT'] == '2' else 600)\n"
    run = local_run(waits, launch=beside(tmp_path, fails), restart_in_place=1)
    assert run.run() == 0
    assert run.ends == [("failed", "restart"), ("completed", "end")]
    first = run.lines("end")[0]
    assert (first["error_class"], first["detail"]) == ("component", "component data exited with code 3: no more data")


def test_component_may_exit_with_zero_before_the_ranks(local_run: Make, tmp_path: Any) -> None:
    run = local_run(WAITS + "time.sleep(1)\n", launch=beside(tmp_path, "print('serving and done')"))
    assert run.run() == 0
    assert run.ends == [("completed", "end")]


def test_component_nodes_are_read_from_the_het_group_variables(local_run: Make, tmp_path: Any) -> None:
    launch = read_launch(local_run("", launch={**beside(tmp_path, SERVE), "backend": "slurm"}).dir)
    found = component_nodes(launch, {"SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}, ["n1"])
    assert found == {"HPCACCEL_NODES": "n1", "HPCACCEL_NODES_DATA": "n2,n3"}
