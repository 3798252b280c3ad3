"""Continuations of ended trials: which trials continue, with which settings and from which checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import is_pinned, pin
from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.records import WorkerEnd, to_dict
from hpcaccel.errors import UserError
from hpcaccel.sweeps.journal_notes import SETTINGS
from hpcaccel.sweeps.results import ranking
from hpcaccel.sweeps.retry import continued, extend, retry_failed
from hpcaccel.sweeps.study import AskedTrial
from hpcaccel.sweeps.sweep_handle import Sweep
from hpcaccel.sweeps.trial_files import DeferredCleanup, drop_checkpoints
from tests.sweeps.sweeping import Place, Trials
from tests.sweeps.test_control_commands import over


def checkpoint(sweep: Sweep, number: int, *, step: int) -> Path:
    folder = sweep.dir.trial(number).checkpoints / checkpoint_files.checkpoint_name(step)
    folder.mkdir()
    write_json(folder / checkpoint_files.MANIFEST, {"step": step})
    return folder


def tidy(sweep: Sweep, number: int, *, keep: int | None) -> None:
    """Clean up as the tuner does after a trial."""
    sweep._study.read()
    chores = DeferredCleanup(sweep.dir, keep=keep, goal=sweep.goal, record=sweep._study.record)
    chores.add(number)
    assert chores.run() == []


def begin_again(trials: Trials) -> int:
    """Start the waiting trial."""
    asked = trials.study.ask()
    assert isinstance(asked, AskedTrial)
    return asked.number


def test_checkpoint_is_pinned_until_a_continuation_has_completed(place: Place) -> None:
    sweep = over(place)
    trials = Trials(sweep.dir)
    failed = trials.fail()
    source = checkpoint(sweep, failed, step=40)
    retry_failed(sweep.dir)
    drop_checkpoints(sweep.dir.trial(failed))
    assert is_pinned(source)
    second = begin_again(trials)
    trials.study.fail(second)  # no save yet: its retry starts from the same checkpoint
    tidy(sweep, second, keep=0)
    assert is_pinned(source)
    (again,) = retry_failed(sweep.dir)
    assert (again.trial, again.checkpoint_step) == (second, 40)
    third = begin_again(trials)
    job = continued(sweep.dir, sweep.spec.job, sweep.trials[third].user_attrs)
    assert job.checkpoint.resume == str(source)
    trials.study.complete(third, [1.0])
    tidy(sweep, third, keep=0)
    assert not source.exists()


@pytest.mark.parametrize("top", [0, -1])
def test_number_of_points_to_extend_is_at_least_one(place: Place, top: int) -> None:
    sweep = over(place)
    Trials(sweep.dir).complete(1.0)
    with pytest.raises(UserError, match=rf"top is {top}.* pass 1 or more"):
        extend(sweep.dir, top, settings=["args.epochs=20"])


def test_pin_set_by_a_user_is_kept(place: Place) -> None:
    sweep = over(place)
    trials = Trials(sweep.dir)
    first = trials.complete(1.0)
    source = checkpoint(sweep, first, step=8)
    pin(source, why="I want it")
    extend(sweep.dir, 1, settings=["args.epochs=20"])
    second = begin_again(trials)
    trials.study.complete(second, [0.5])
    tidy(sweep, second, keep=0)
    assert is_pinned(source)


def test_checkpoint_is_kept_until_all_its_continuations_have_ended(place: Place) -> None:
    sweep = over(place)
    trials = Trials(sweep.dir)
    source = checkpoint(sweep, trials.complete(1.0), step=8)
    for epochs in (20, 40):
        extend(sweep.dir, 1, settings=[f"args.epochs={epochs}"])
    for kept in (True, False):
        number = begin_again(trials)
        trials.study.complete(number, [0.5])
        tidy(sweep, number, keep=1)
        assert source.exists() is kept


def test_extend_continues_all_seeds_of_a_point_as_one_point(place: Place) -> None:
    sweep = over(place, "sweep.repeat=2")
    trials = Trials(sweep.dir)
    for value in (4.0, 4.5, 1.0, 2.0):
        trials.complete(value)
    queued = extend(sweep.dir, 1, settings=["args.epochs=20"])
    assert [one.trial for one in queued] == [2, 3]
    seeds = []
    for value in (0.5, 0.7):
        asked = trials.study.ask()
        assert isinstance(asked, AskedTrial)
        seeds.append(asked.seed)
        trials.study.complete(asked.number, [value])
    assert seeds == [0, 1]
    leader = ranking(sweep.trials, sweep.goal)[0]
    assert (leader.values, leader.is_whole, leader.trial.number) == ((0.6,), True, 4)
    with pytest.raises(UserError, match=r"have already been extended with args\.epochs=20"):
        extend(sweep.dir, 1, settings=["args.epochs=20"])
    assert [one.trial for one in extend(sweep.dir, 2, settings=["args.epochs=20"])] == [0, 1]
    assert [one.trial for one in extend(sweep.dir, 1, settings=["args.epochs=40"])] == [4, 5]
    assert sweep.trials[-1].user_attrs[SETTINGS] == ["args.epochs=20", "args.epochs=40"]


def test_extend_with_several_metrics_continues_the_pareto_front(place: Place) -> None:
    sweep = over(place, "sweep.metric=[loss, seconds]", "sweep.mode=[min, min]")
    trials = Trials(sweep.dir)
    for values in ((1.0, 9.0), (1.5, 10.0), (2.0, 2.0), (3.0, 3.0)):
        trials.complete(*values)
    assert [one.trial for one in extend(sweep.dir, 2, settings=["args.epochs=20"])] == [0, 2]
    for values in ((0.5, 9.0), (1.0, 2.0)):
        trials.study.complete(begin_again(trials), values)
    assert [found.trial for found in sweep.status().front] == [4, 5]


def test_retry_of_a_failed_extension_keeps_its_settings(place: Place) -> None:
    sweep = over(place)
    trials = Trials(sweep.dir)
    trials.complete(1.0)
    extend(sweep.dir, 1, settings=["args.epochs=20"])
    trials.study.fail(begin_again(trials))
    retry_failed(sweep.dir)
    job = continued(sweep.dir, sweep.spec.job, sweep.trials[2].user_attrs)
    assert job.entrypoint.args["epochs"] == 20  # type: ignore[call-overload]
    assert sweep.trials[2].user_attrs["origin"] == "extend"


def spent(sweep: Sweep, gpu_hours: float) -> None:
    account = sweep.dir.worker(0).account
    append_line(account, {"event": "start", "time": 1000.0, "job_id": "46_0", "gpus": 1})
    append_line(account, to_dict(WorkerEnd(time=1000.0 + gpu_hours * 3600, reason="completed", decision="end")))


def test_larger_budget_continues_the_trials_that_the_budget_stopped(place: Place) -> None:
    sweep = over(place, "sweep.max_gpu_hours=1", "sweep.max_trials=4")
    trials = Trials(sweep.dir)
    for _ in range(4):
        number = trials.begin()
        source = checkpoint(sweep, number, step=40)
        trials.study.mark(number, {"error_class": "budget", "detail": "less than one trial takes"})
        trials.study.prune(number, last=(40, 2.0))
    spent(sweep, 1.5)
    now = sweep.status()
    assert (now.state, now.exit_code) == ("failed", 1)
    assert "no trial has completed" in now.detail
    before = sweep.dir.journal.read_text()
    for steer in (sweep.resume, sweep.retry_failed, lambda: sweep.extend(1)):
        with pytest.raises(UserError, match=r"max_gpu_hours.* have been used: no more trials can start\. To continue"):
            steer()
    assert sweep.dir.journal.read_text() == before
    sweep.resume(changes=["sweep.max_gpu_hours=5"])
    waiting = [trial for trial in sweep.trials if trial.state == "waiting"]
    assert len(waiting) == 4
    job = continued(sweep.dir, sweep.spec.job, waiting[-1].user_attrs)
    assert job.checkpoint.resume == str(source)
    assert is_pinned(source)
