"""Control of a sweep: stop, resume with changes, retries, extensions, and the best trial as a spec."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import append_line, read_json, write_json
from hpcaccel.core.records import WorkerEnd, WorkerStart, to_dict
from hpcaccel.core.stop_requests import open_requests
from hpcaccel.errors import ClusterError, RunBusy, RunDirectoryError, SlurmCommandError, SpecError, UserError
from hpcaccel.slurm.states import JobState
from hpcaccel.spec import load_spec
from hpcaccel.submission.jobs import job_submission, run_state
from hpcaccel.sweeps.definition import read_definition
from hpcaccel.sweeps.journal_notes import OwnershipNotes
from hpcaccel.sweeps.journal_reader import StudyRecord
from hpcaccel.sweeps.retry import continued
from hpcaccel.sweeps.sweep_handle import Sweep
from tests.sweeps.sweeping import SPEC, Place, Trials


def begin(place: Place, sweep: Sweep, *workers: int, gpus: int = 2) -> None:
    """Start the jobs of these workers."""
    for index in workers:
        job_id = f"{sweep.record.job_ids[-1]}_{index}"
        place.slurm.move(job_id, JobState.RUNNING)
        line = WorkerStart(time=time.time() - 60, job_id=job_id, gpus=gpus, allocated_at=time.time() - 60)
        append_line(sweep.dir.worker(index).account, to_dict(line))


def end(place: Place, sweep: Sweep, *workers: int, reason: str = "completed", decision: str = "end") -> None:
    for index in workers:
        place.slurm.move(f"{sweep.record.job_ids[-1]}_{index}", JobState.COMPLETED)
        line = WorkerEnd(time=time.time(), reason=reason, decision=decision)  # type: ignore[arg-type]
        append_line(sweep.dir.worker(index).account, to_dict(line))


def over(place: Place, *overrides: str) -> Sweep:
    """A sweep whose four workers have ended without an error."""
    sweep, _ = place.start(*overrides)
    begin(place, sweep, 0, 1, 2, 3)
    end(place, sweep, 0, 1, 2, 3)
    return sweep


def test_status_gives_the_states_of_the_workers_and_the_sweep(place: Place) -> None:
    sweep, _ = place.start()
    assert sweep.status().workers == {"pending": 4}
    begin(place, sweep, 0, 1)
    end(place, sweep, 1, reason="preempted", decision="requeue")
    place.slurm.move("100_1", JobState.PENDING)
    now = sweep.status()
    assert (now.state, now.workers) == ("running", {"running": 1, "requeued": 1, "pending": 2})
    assert now.gpu_hours == pytest.approx(4 * 60 / 3600, rel=0.1)
    end(place, sweep, 0)
    place.slurm.cancel("100")
    assert sweep.status().state == "completed"


def test_stop_requests_a_pause_and_cancels_pending_workers(place: Place) -> None:
    sweep, _ = place.start()
    begin(place, sweep, 0, 1)
    sweep.stop()
    assert [request.then for _, request in open_requests(sweep.dir)] == ["pause"]
    assert place.slurm.jobs["100_3"].state is JobState.CANCELLED
    assert place.slurm.jobs["100_0"].state is JobState.RUNNING
    end(place, sweep, 0, 1, reason="stop", decision="pause")
    now = sweep.status()
    assert (now.state, now.workers, now.exit_code) == ("paused", {"paused": 4}, 85)


def test_unfinished_trials_of_a_paused_sweep_are_shown_as_interrupted(place: Place) -> None:
    sweep, _ = place.start()
    trials = Trials(sweep.dir)
    trials.begin()
    assert [row["state"] for row in sweep.table()] == ["running"]
    sweep.stop()
    assert sweep.status().state == "paused"
    assert [row["state"] for row in sweep.table()] == ["interrupted"]


def test_resume_adopts_the_workers_submitted_by_a_killed_resume(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, _ = place.start()
    sweep.stop()
    with monkeypatch.context() as patch:  # as if killed right after sbatch
        patch.setattr(job_submission.JobSubmission, "clear_intent", lambda turn: None)
        patch.setattr(run_state, "write_record", lambda *args, **more: None)
        sweep.resume()
    assert sweep.record.job_ids == ["100"]
    assert sweep.resume().jobs == {index: f"101_{index}" for index in range(4)}
    assert [one.job_id for one in place.slurm.submissions] == ["100", "101"]
    assert sweep.record.job_ids == ["100", "101"]
    assert sweep.status().workers == {"pending": 4}
    with pytest.raises(RunBusy):
        sweep.resume()


def test_resume_submits_the_same_workers_after_they_have_stopped(place: Place) -> None:
    sweep, _ = place.start()
    begin(place, sweep, 0)
    with pytest.raises(RunBusy, match=r"with 4 of its workers running or queued.*sweep stop"):
        sweep.resume()
    sweep.stop()
    with pytest.raises(RunBusy, match=r"is stopping, and its trials are being saved: wait.*`hpcaccel wait"):
        sweep.resume()
    end(place, sweep, 0, reason="stop", decision="pause")
    arrays = sweep.resume()
    assert arrays.array_ids == ["101"]
    assert open_requests(sweep.dir) == []
    assert place.slurm.submissions[1].text == place.slurm.submissions[0].text
    assert sweep.status().workers == {"requeued": 1, "pending": 3}
    assert sweep.record.job_ids == ["100", "101"]


def test_resume_refused_by_slurm_changes_nothing(place: Place) -> None:
    sweep, _ = place.start()
    sweep.stop()
    before = sweep.dir.sweep.read_text(), sweep.dir.spec_yaml.read_text()
    place.slurm.refuse = "Invalid account"
    with pytest.raises(ClusterError, match="Invalid account"):
        sweep.resume(changes=["sweep.max_trials=30"])
    assert (sweep.dir.sweep.read_text(), sweep.dir.spec_yaml.read_text()) == before
    assert len(open_requests(sweep.dir)) == 1
    assert sweep.status().state == "paused"


def test_resume_with_a_lost_sbatch_reply_is_kept_and_not_submitted_twice(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, _ = place.start()
    sweep.stop()
    sbatch = place.slurm.sbatch

    def timed_out(*args: Any, **more: Any) -> str:
        sbatch(*args, **more)
        raise SlurmCommandError(["sbatch"], 1, "Socket timed out on send/recv operation")

    with monkeypatch.context() as patch:
        patch.setattr(place.slurm, "sbatch", timed_out)
        with pytest.raises(SlurmCommandError, match=r"unknown whether Slurm accepted the job.* Another resume"):
            sweep.resume(changes=["sweep.max_trials=30"])
    assert open_requests(sweep.dir) == []
    assert sweep.spec.sweep.max_trials == 30
    assert sweep.resume(changes=["sweep.max_trials=30"]).array_ids == ["101"]
    assert len(place.slurm.submissions) == 2


def test_resume_without_slurm_configuration_changes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, _ = place.start()
    sweep.stop()

    def silent() -> dict[str, str]:
        raise SlurmCommandError(["scontrol"], 124, "no answer within 60 s")

    with monkeypatch.context() as patch:
        patch.setattr(place.slurm, "config", silent)
        with pytest.raises(SlurmCommandError, match=r"no answer within 60 s$"):
            sweep.resume(changes=["sweep.max_trials=30"])
    assert len(open_requests(sweep.dir)) == 1
    assert sweep.spec.sweep.max_trials == 20
    assert len(place.slurm.submissions) == 1


def test_resume_on_a_read_only_disk_reports_the_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, _ = place.start()
    sweep.stop()

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", read_only)
    with pytest.raises(
        RunDirectoryError,
        match=r"cannot write to the sweep's directory .*: Read-only file system\. No worker was started",
    ):
        sweep.resume()
    assert len(place.slurm.submissions) == 1


def test_resume_clears_the_halt_of_a_failed_sweep(place: Place) -> None:
    sweep = over(place)
    sweep._study.record.file.append([{"hpcaccel": "halt", "why": "the first 5 trials all failed"}])
    now = sweep.status()
    assert (now.state, now.detail) == ("failed", "the first 5 trials all failed")
    sweep.resume()
    assert OwnershipNotes(StudyRecord(sweep.dir.journal)).read().halted == ""


def test_resume_applies_allowed_changes(place: Place) -> None:
    sweep = over(place)
    Path("sweep.yaml").write_text(SPEC.replace("max_trials: 20", "max_trials: 50").replace("workers: 4", "workers: 6"))
    Path("sweep.yaml").write_text(Path("sweep.yaml").read_text().replace("name: demo", "name: other"))
    arrays = sweep.resume(file="sweep.yaml", changes=["sweep.retries=3"])
    assert len(arrays.jobs) == 6
    section = sweep.spec.sweep
    assert (section.max_trials, section.workers, section.retries) == (50, 6, 3)
    assert sweep.dir.worker_indices() == list(range(6))
    assert "max_trials: 50" in sweep.dir.spec_yaml.read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["args.epochs=5"], r"entrypoint\.args\.epochs was 2 and is now 5.*Only sweep\.max_trials"),
        (["sweep.method=tpe", "slurm.time=90"], r"slurm\.time was '01:00:00' and is now '01:30:00'; sweep\.method was"),
        (["sweep.max_trails=5"], "max_trials"),
    ],
)
def test_resume_refuses_other_changes(place: Place, changes: list[str], message: str) -> None:
    sweep = over(place)
    with pytest.raises(SpecError, match=message):
        sweep.resume(changes=changes)
    assert len(place.slurm.submissions) == 1


def test_resume_with_all_trials_ended_needs_a_higher_max_trials(place: Place) -> None:
    sweep = over(place, "sweep.max_trials=4")
    trials = Trials(sweep.dir)
    for value in (4.0, 3.0, 2.0, 1.0):
        trials.complete(value)
    with pytest.raises(UserError, match=r"all trials of sweep .* \(4\) have ended: .*sweep\.max_trials=8"):
        sweep.resume()
    assert len(sweep.resume(changes=["sweep.max_trials=8"]).jobs) == 4


def test_throttle_is_divided_among_all_arrays(place: Place) -> None:
    place.slurm.settings["MaxArraySize"] = "3"
    sweep, _ = place.start("sweep.workers=5")
    sweep.throttle(4)
    assert place.slurm.throttled == {"100": 3, "101": 1}
    with pytest.raises(UserError, match="2 job arrays"):
        sweep.throttle(1)


def test_retry_failed_queues_new_trials_with_the_same_parameters(place: Place) -> None:
    sweep = over(place)
    with pytest.raises(UserError, match=r"no trial of sweep .* has failed"):
        sweep.retry_failed()
    trials = Trials(sweep.dir)
    trials.complete(1.0)
    failed = trials.fail(error_class="oom", detail="CUDA out of memory")
    checkpoint(sweep, failed, step=40)
    queued, arrays = sweep.retry_failed()
    assert [(one.trial, one.checkpoint_step) for one in queued] == [(failed, 40)]
    assert arrays is not None
    assert list(arrays.jobs) == [0]
    assert [trial.state for trial in sweep.trials] == ["complete", "failed", "waiting"]
    assert sweep.trials[2].params == sweep.trials[1].params
    (failure,) = sweep.status().failures
    assert (failure.error_class, failure.count, failure.detail) == ("oom", 1, "CUDA out of memory")
    with pytest.raises(UserError, match="has already been queued again"):
        sweep.retry_failed()
    job = continued(sweep.dir, sweep.spec.job, sweep.trials[2].user_attrs)
    assert job.checkpoint.resume == str(sweep.dir.trial(failed).checkpoints / "step_00000040")


def checkpoint(sweep: Sweep, number: int, *, step: int) -> None:
    folder = sweep.dir.trial(number).checkpoints / f"step_{step:08d}"
    folder.mkdir()
    write_json(folder / "COMMITTED", {"step": step})


def test_extend_continues_the_best_trials_with_new_settings(place: Place) -> None:
    sweep = over(place)
    trials = Trials(sweep.dir)
    for value in (4.0, 1.0, 3.0, 2.0):
        trials.complete(value)
    checkpoint(sweep, 1, step=8)
    with pytest.raises(UserError, match=r"no trial of sweep \S+ was pruned"):
        sweep.extend(2)
    with pytest.raises(SpecError, match=r"args\.lr is a parameter of the sweep"):
        sweep.extend(2, settings=["entrypoint.args.lr=1"])
    with pytest.raises(SpecError, match="epoch"):
        sweep.extend(2, settings=["checkpoint.epochs=4"])
    queued, _ = sweep.extend(2, settings=["args.epochs=20"])
    assert [(one.trial, one.checkpoint_step) for one in queued] == [(1, 8), (3, None)]
    waiting = [trial for trial in sweep.trials if trial.state == "waiting"]
    job = continued(sweep.dir, sweep.spec.job, waiting[0].user_attrs)
    assert job.entrypoint.args["epochs"] == 20  # type: ignore[call-overload]
    assert job.checkpoint.resume.endswith("trials/1/checkpoints/step_00000008")


def test_retry_failed_submits_no_worker_while_one_is_running(place: Place) -> None:
    sweep, _ = place.start()
    begin(place, sweep, 0)
    Trials(sweep.dir).fail()
    assert sweep.retry_failed()[1] is None
    assert len(place.slurm.submissions) == 1


def test_best_trial_can_be_written_as_an_equal_job_spec(place: Place) -> None:
    sweep, _ = place.start("sweep.repeat=2", "sweep.seed=7")
    with pytest.raises(UserError, match="has no complete trial yet"):
        sweep.best()
    trials = Trials(sweep.dir)
    for value in (4.0, 4.5, 1.0, 2.0):
        trials.complete(value)
    found = sweep.best()
    assert (found.trial, found.values, found.seeds) == (2, {"loss": 1.5}, 2)
    Path("best.yaml").write_text(found.to_yaml())
    again = load_spec("best.yaml")
    document = read_json(sweep.dir.trial(2).spec)
    assert document is not None
    assert again.model_dump(mode="json") == document["spec"]
    assert again.runtime.seed == 7
    assert f"# Trial 2 of sweep {sweep.run_id}: loss 1.5 (mean of 2 seeds)" in Path("best.yaml").read_text()
    assert sweep.best(trial=1).values == {"loss": 4.5}
    with pytest.raises(UserError, match="no trial 9"):
        sweep.best(trial=9)


def test_best_of_several_metrics_needs_a_chosen_metric(place: Place) -> None:
    sweep, _ = place.start("sweep.metric=[loss, seconds]", "sweep.mode=[min, min]")
    trials = Trials(sweep.dir)
    for values in ((1.0, 9.0), (2.0, 2.0), (3.0, 3.0)):
        trials.complete(*values)
    with pytest.raises(UserError, match=r"trial 0: loss 1, seconds 9\n  trial 1: loss 2, seconds 2$"):
        sweep.best()
    assert sweep.best(metric="seconds").trial == 1
    with pytest.raises(UserError, match=r"'time' is not a metric of the sweep \(allowed: loss, seconds\)"):
        sweep.best(metric="time")
    assert [found.trial for found in sweep.status().front] == [0, 1]


def test_directory_without_a_sweep_is_refused(place: Place) -> None:
    sweep, _ = place.start()
    sweep.dir.sweep.unlink()
    with pytest.raises(RunDirectoryError, match="is not the directory of a sweep"):
        read_definition(sweep.dir)
