"""Tests of ranks that torchrun starts: the same environment, logs, signals and exit codes as without it."""

from __future__ import annotations

from collections.abc import Callable

from .conftest import LocalRun, outcome

Make = Callable[..., LocalRun]
TORCHRUN = {"launcher": "torchrun"}
STOPS = f"""
import os, signal, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
folder = os.path.join(os.environ["HPCACCEL_RUN_DIR"], "attempts", os.environ["HPCACCEL_ATTEMPT"])
assert signal.sigwait({{signal.SIGUSR2}}) == signal.SIGUSR2
if os.environ["RANK"] == "0":
    {outcome(step=3, resume=True)}
sys.exit(85)
"""
DIES = """
import os, signal
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
signal.sigwait({signal.SIGTERM})
"""


def test_stop_signals_the_ranks_but_not_torchrun(local_run: Make) -> None:
    run = local_run(STOPS, ranks=2, launch=TORCHRUN)
    run.start()
    run.wait_for("rank 1 of 2 0", rank=1, timeout=300)
    run.wait_for("rank 0 of 2 0", timeout=300)
    run.ask("pause")
    assert run.wait() == 85, run.log
    assert run.ends == [("stop", "pause")]


def test_attempt_has_the_exit_code_of_the_first_failed_rank(local_run: Make) -> None:
    run = local_run(DIES, ranks=2, launch=TORCHRUN, restart_in_place=0, requeue=False)
    run.start()
    assert run.wait(300) == 1, run.log
    assert run.lines("end")[0]["exit_code"] == 137
