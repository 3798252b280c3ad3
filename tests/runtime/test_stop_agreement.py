"""Stop signals set a flag in the main thread, and all ranks stop at the same step."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hpcaccel.runtime.stop_flag import StopFlag, signals_held
from hpcaccel.runtime.training import agreed_actions
from hpcaccel.runtime.training.agreed_actions import AgreedActions, AgreementPace
from hpcaccel.runtime.training.stop_agreement import BUSY, DONE, FAILED, StopAgreement, StopDecision
from tests.checkpoint.world import run_ranks as run_in_ranks
from tests.runtime.ranks import make_run, outcome, run_ranks


def in_process(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_signal_blocked_before_the_program_is_delivered_once() -> None:
    ended = in_process(
        """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGUSR2)
from hpcaccel.runtime.stop_flag import StopFlag
flag = StopFlag()
count = 0
def count_it(number, frame, inner=flag._raise):
    global count
    count += 1
    inner(number, frame)
flag._raise = count_it
assert not flag.raised
assert flag.install()
assert flag.raised and count == 2, count
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGUSR2}
flag.clear()
assert not flag.raised
"""
    )
    assert ended.returncode == 0, ended.stderr


def test_no_handler_is_installed_outside_the_main_thread() -> None:
    found = []
    before = signal.getsignal(signal.SIGUSR2)
    thread = threading.Thread(target=lambda: found.append(StopFlag().install()))
    thread.start()
    thread.join()
    assert found == [False]
    assert signal.getsignal(signal.SIGUSR2) == before


def test_held_signals_are_delivered_afterwards() -> None:
    seen = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        with signals_held():
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)  # os.kill may choose another thread
            assert seen == []
        assert seen == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_single_rank_reads_its_own_stop_decision_once() -> None:
    agreement = StopAgreement(None)
    assert agreement.read() is None
    agreement.issue(stop=True, save=False)
    assert agreement.pending
    assert agreement.read() == StopDecision(stop=True, save=False, active=True)
    assert agreement.read() is None


@pytest.mark.parametrize(
    ("arguments", "kill_at"),
    [
        (["--mode", "one", "--accumulate", "2"], 9),
        pytest.param(["--mode", "two"], 5, marks=pytest.mark.chaos),
        pytest.param(["--mode", "rare"], 4, marks=pytest.mark.chaos),
    ],
)
def test_script_without_a_prepared_loader_stops_at_its_next_step(
    tmp_path: Path, arguments: list[str], kill_at: int
) -> None:
    """The script uses Accelerate's names only. With two optimizers it never stops between their steps."""
    undisturbed = run_ranks("without_loader.py", arguments, run=make_run(tmp_path / "undisturbed"))
    assert undisturbed.codes == [0, 0], undisturbed.outputs
    run = make_run(tmp_path / "stopped")
    stopped = run_ranks("without_loader.py", [*arguments, "--kill-at", str(kill_at)], run=run)
    assert stopped.codes == [85, 85], stopped.outputs
    assert (outcome(run) or {})["resume"]
    resumed = run_ranks("without_loader.py", arguments, run=run, attempt=2)
    assert resumed.codes == [0, 0], resumed.outputs
    assert resumed.result() == undisturbed.result()


PARTS: list[list[dict[str, Any]]] = [
    [{}, {}],
    [{"stop": True}, {}],
    [{}, {"save": True}],
    [{}, {"snapshot": True}],
    [{"saving": BUSY}, {}],
    [{"saving": BUSY}, {"saving": FAILED}],
    [{"passes": 3}, {"passes": 3}],
    [{"passes": 3}, {"passes": 4}],
    [{"passes": 4}, {"active": False, "passes": 3}],
    [{"active": False}, {"active": False, "stop": True}],
    [{"own": 40}, {"own": 50}],
]
"""What each of two ranks issues, where it is not the default."""


def test_agreement_of_two_ranks_combines_their_flags() -> None:
    found = run_ranks("agreements.py", [json.dumps(PARTS)])
    assert found.codes == [0, 0], found.outputs
    decisions = [json.loads(output.splitlines()[-1]) for output in found.outputs]
    defaults = {
        "stop": False,
        "save": False,
        "active": True,
        "passes": 0,
        "saving": DONE,
        "snapshot": False,
        "own": None,
    }
    for number, parts in enumerate(PARTS):
        first, second = both = [{**defaults, **part} for part in parts]
        expected = {
            "stop": any(part["stop"] for part in both),
            "save": any(part["save"] for part in both),
            "active": any(part["active"] for part in both),
            "uneven": first["active"] and second["active"] and first["passes"] != second["passes"],
            "saving": max(part["saving"] for part in both),
            "snapshot": any(part["snapshot"] for part in both),
            "steps": 1,
            "times": [part["own"] for part in both if part["own"]],
        }
        assert [rank[number] for rank in decisions] == [expected, expected], parts


# -- how often ---------------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(agreed_actions, "monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize(("step_seconds", "steps"), [(0.0005, 32), (0.02, 10), (0.06, 3), (0.12, 1), (30.0, 1)])
def test_ranks_with_short_steps_agree_less_often(clock: Clock, step_seconds: float, steps: int) -> None:
    pace = AgreementPace()
    proposals = []
    for _ in range(20_000 if step_seconds < 1 else 20):
        clock.now += step_seconds
        pace.step_is_over()
        pace.was_read()
        proposals.append((clock.now, pace.propose(math.inf)))
    early = [number for now, number in proposals if now < 100.0 + agreed_actions.FIRST_SECONDS]
    assert set(early) <= {1}
    assert proposals[-1][1] == steps
    assert pace.propose(3) == min(steps, 3)
    assert pace.propose(-1) == 1


def agree_every_third_step(rank: int) -> list[list[int]]:
    """The steps at which a rank issues and reads agreements, with a save at step 8 and a stop from step 10 on."""
    agreement = StopAgreement(dist.group.WORLD)
    said: list[list[int]] = [[], []]
    original = agreement.read

    def read() -> StopDecision | None:
        found = original()
        if found is not None:
            said[1].append(counters.step)
        return found

    agreement.read = read  # type: ignore[method-assign]
    counters, flag = SimpleNamespace(step=0), SimpleNamespace(raised=False)
    ended = []

    class Saves:
        due_step, due_time, background_progress = 8.0 + 100 * rank, math.inf, 0
        snapshots = SimpleNamespace(due_step=math.inf)

        def is_due(self, step: int) -> bool:
            return step >= self.due_step

        def due(self) -> None:
            said[0].append(counters.step)
            self.due_step = 100.0

    context = SimpleNamespace(
        counters=counters, flag=flag, in_use=SimpleNamespace(passes=0), own_time=None, group=None,
        checkpoints=SimpleNamespace(in_flight=False, hurry=lambda: None),
    )  # fmt: skip
    stop = SimpleNamespace(profiler=None, save_requests=None, agreement=agreement)
    end = SimpleNamespace(stop=lambda: ended.append(counters.step))
    actions: Any = AgreedActions(context, stop, Saves(), end)  # type: ignore[arg-type]
    actions._pace.propose = lambda most: max(1, min(3, most)) if rank == 0 else 1
    actions.begin()
    while not ended:
        counters.step += 1
        flag.raised = rank == 1 and counters.step >= 10
        actions.at_step(counters.step)
    return [*said, ended]


def test_all_ranks_agree_at_the_steps_that_rank_0_proposes() -> None:
    answers = run_in_ranks(agree_every_third_step, world_size=3)
    assert answers == [[[8], [1, 4, 7, 8, 9, 12], [12]]] * 3
