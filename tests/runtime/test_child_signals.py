"""Child processes of a rank: they ignore the scheduler's signals, and end when the rank terminates them or ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_json, write_json
from tests.runtime.ranks import BLOCKED, ROOT, make_run, run_ranks

PROGRAM = Path(__file__).parent / "programs" / "parent.py"
TIMEOUT_SECONDS = 60
"""Far more than any case takes. Without ``shield_children`` nearly every case hangs."""

FORKED = [(kind, "fork") for kind in ("serve", "deaf", "tidy")]
ANEW = [
    pytest.param(kind, method, marks=() if (kind, method) == ("serve", "spawn") else pytest.mark.chaos)
    for kind in ("serve", "deaf", "tidy")
    for method in ("spawn", "forkserver")
]


def run_parent(kind: str, *, method: str = "fork", end: str = "ok", early: str = "late") -> tuple[int, list[str]]:
    """Exit code and output lines of a rank with children, started as the shim starts it."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), kind, method, end, early],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HPCACCEL_RUN_DIR": "/"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED),
    ) as parent:
        try:
            output, _ = parent.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            if parent.poll() is None:
                os.killpg(parent.pid, signal.SIGKILL)
    return parent.returncode, output.splitlines()


@pytest.mark.parametrize(
    ("end", "code"), [("ok", 0), ("raise", 1), ("exit", 3), ("interrupt", -signal.SIGINT), ("scheduler", 0)]
)
def test_rank_ends_without_waiting_for_its_daemonic_children(end: str, code: int) -> None:
    assert run_parent("serve", end=end) == (code, ["9", *(["16 1 True"] if end == "scheduler" else []), "ready"])


@pytest.mark.parametrize(("kind", "method"), [*FORKED, *ANEW])
@pytest.mark.parametrize("early", ["early", "late"])
def test_children_of_every_start_method_end_with_the_rank(kind: str, method: str, early: str) -> None:
    """Also children started before the Accelerator exists, with the signal mask that the shim sets."""
    code, lines = run_parent(kind, method=method, early=early)
    assert (code, lines[:2]) == (0, ["9", "ready"])
    if kind == "tidy" and (method == "fork" or early == "late"):
        assert lines[2:] == ["tidied up"]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.chaos)])
@pytest.mark.parametrize("early", ["early", "late"])
def test_leaving_a_busy_pool_ends_its_workers(method: str, early: str) -> None:
    """Leaving its ``with`` block sends SIGTERM to the workers and waits for them."""
    assert run_parent("pool", method=method, early=early) == (0, ["285", "ready"])


def test_leaving_a_pool_with_fewer_tasks_than_workers_ends_its_workers() -> None:
    assert run_parent("small_pools") == (0, [*["5"] * 10, "ready"])


def test_children_terminated_right_after_their_start_end() -> None:
    """Their signal handlers are not installed yet."""
    assert run_parent("at_once") == (0, ["40", "ready"])


def test_terminated_child_has_the_same_exit_code_as_without_hpcaccel() -> None:
    assert run_parent("serve", end="terminate") == (0, ["9", "exit code -15", "ready"])
    assert run_parent("tidy", end="terminate") == (0, ["9", "tidied up", "exit code 7", "ready"])


def test_subprocess_of_a_child_is_ended_by_sigterm() -> None:
    assert run_parent("with_program") == (0, ["-15", "ready"])


STRANGER = """
import multiprocessing, os, subprocess, time
from hpcaccel.runtime import child_signals

child_signals.{install}
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,), daemon=True)
child.start()
os.waitpid(child.pid, 0)  # as a script does that waits for its children itself
found = subprocess.run(["sh", "-c", "sleep 60 >&- 2>&- & echo $!"], stdout=subprocess.PIPE, check=True)
child._popen.pid = int(found.stdout)  # the pid is used again
print(int(found.stdout), flush=True)
child.terminate() if {terminates} else None
child.join()
"""


@pytest.mark.parametrize(
    ("install", "terminates"), [("end_children_at_exit()", False), ("shield_children(None)", True)]
)
def test_process_that_has_got_the_pid_of_an_ended_child_is_not_signalled(install: str, terminates: bool) -> None:
    program = STRANGER.format(install=install, terminates=terminates)
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    state = Path(f"/proc/{int(ended.stdout)}/stat").read_text().rpartition(")")[2].split()[0]
    os.kill(int(ended.stdout), signal.SIGKILL)
    assert state == "S"  # it sleeps, and is no zombie


@pytest.mark.torch
@pytest.mark.parametrize(("thread", "stop"), [("main", "signals"), ("thread", "cooperative")])
def test_program_that_handles_no_signals_ends_despite_persistent_workers(
    tmp_path: Path, thread: str, stop: str
) -> None:
    """The workers ignore the SIGTERM that Python sends to them before it waits for their end."""
    run = make_run(tmp_path / "run")
    spec = read_json(run.spec)
    assert spec is not None
    write_json(run.spec, {**spec, "launch": {**spec["launch"], "stop": stop}})
    ended = run_ranks("persistent_workers.py", [thread], size=1, launcher="alone", run=run)
    assert (ended.codes, ended.outputs) == ([0], ["28.0\n"])
