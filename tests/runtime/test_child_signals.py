"""A rank's children pass the scheduler's signals over, and leave when the rank ends them or ends itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.ranks import BLOCKED, ROOT

PROGRAM = Path(__file__).parent / "programs" / "parent.py"
TIMEOUT_SECONDS = 60
"""Far more than any of it takes; without the shield nearly all of it takes for ever."""

FORKED = [(kind, "fork") for kind in ("serve", "deaf", "tidy")]
ANEW = [
    pytest.param(kind, method, marks=() if (kind, method) == ("serve", "spawn") else pytest.mark.chaos)
    for kind in ("serve", "deaf", "tidy")
    for method in ("spawn", "forkserver")
]


def run_parent(kind: str, *, method: str = "fork", end: str = "ok", early: str = "late") -> tuple[int, list[str]]:
    """What a rank with such children prints, as the shim starts it."""
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
def test_a_rank_does_not_wait_for_its_daemonic_children(end: str, code: int) -> None:
    assert run_parent("serve", end=end) == (code, ["9", *(["16 1 True"] if end == "scheduler" else []), "ready"])


@pytest.mark.parametrize(("kind", "method"), [*FORKED, *ANEW])
@pytest.mark.parametrize("early", ["early", "late"])
def test_children_of_all_start_methods_leave_at_the_end(kind: str, method: str, early: str) -> None:
    """Also those that were started before there was an Accelerator, with the mask that the shim sets."""
    code, lines = run_parent(kind, method=method, early=early)
    assert (code, lines[:2]) == (0, ["9", "ready"])
    if kind == "tidy" and (method == "fork" or early == "late"):
        assert lines[2:] == ["tidied up"]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.chaos)])
@pytest.mark.parametrize("early", ["early", "late"])
def test_a_pool_that_works_is_left(method: str, early: str) -> None:
    """Its ``with`` ends the children by SIGTERM, and waits for them."""
    assert run_parent("pool", method=method, early=early) == (0, ["285", "ready"])


def test_a_pool_with_fewer_tasks_than_workers_is_left() -> None:
    assert run_parent("small_pools") == (0, [*["5"] * 10, "ready"])


def test_children_that_are_terminated_as_they_start() -> None:
    """They have not set up yet what they listen to."""
    assert run_parent("at_once") == (0, ["40", "ready"])


def test_terminate_ends_a_child_as_it_does_without_us() -> None:
    assert run_parent("serve", end="terminate") == (0, ["9", "exit code -15", "ready"])
    assert run_parent("tidy", end="terminate") == (0, ["9", "tidied up", "exit code 7", "ready"])


def test_a_childs_own_program_hears_sigterm() -> None:
    assert run_parent("with_program") == (0, ["-15", "ready"])
