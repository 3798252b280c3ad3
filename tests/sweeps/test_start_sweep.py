"""Starting a sweep: its directory, its job arrays, and cleanup after a failed start."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.registered_runs import index_lines
from hpcaccel.errors import ClusterError, RunDirectoryError, SlurmCommandError, SlurmUnreachable, SpecError
from hpcaccel.spec import load_sweep, resolve
from hpcaccel.submission.jobs.run_state import read_record
from hpcaccel.sweeps import start_sweep
from hpcaccel.sweeps.definition import read_definition
from hpcaccel.sweeps.start_sweep import foresee
from hpcaccel.sweeps.worker_jobs import chunks
from tests.sweeps.sweeping import SPEC, Place


def test_start_submits_one_array_of_workers_for_one_directory(place: Place) -> None:
    sweep, arrays = place.start()
    (submission,) = place.slurm.submissions
    assert submission.args == ("--array=0-3",)
    assert submission.script == sweep.dir.script
    assert f'work {sweep.path} "$hpcaccel_worker"' in submission.text
    assert f"--output={sweep.path}/workers/%a/slurm.log" in submission.text
    assert arrays.jobs == {index: f"{submission.job_id}_{index}" for index in range(4)}
    assert sweep.dir.worker_indices() == [0, 1, 2, 3]
    assert [read_record(sweep.dir.worker(index)).job_ids for index in (0, 3)] == [["100_0"], ["100_3"]]
    assert (sweep.record.kind, sweep.record.job_ids, sweep.record.array_size) == ("sweep", ["100"], 4)
    assert index_lines()[-1]["path"] == str(sweep.path)
    assert (sweep.dir.code / "train.py").exists()
    assert (sweep.dir.worker(2).path / "node.pyz").resolve() == sweep.dir.node_program


def test_definition_contains_the_program_of_a_trial(place: Place) -> None:
    sweep, _ = place.start()
    definition = read_definition(sweep.dir)
    assert definition.spec == load_sweep("sweep.yaml")
    assert load_sweep(sweep.dir.spec_yaml).sweep == definition.spec.sweep
    job = resolve(definition.spec, {"args.lr": 0.5, "args.depth": 8})
    program = definition.launch_of(job).program
    assert program == ["{python}", str(sweep.dir.code / "train.py"), "--lr", "0.5", "--epochs", "2", "--depth", "8"]
    document = read_json(sweep.dir.sweep)
    assert document is not None
    assert document["chooser"][1] == "-c"


def test_workers_are_limited_to_those_that_get_a_trial(place: Place) -> None:
    assert place.plan("sweep.max_trials=3").workers == 3
    assert place.plan("sweep.max_trials=3", "sweep.pack=2").workers == 2


def test_workers_beyond_max_array_size_get_several_arrays(place: Place) -> None:
    place.slurm.settings["MaxArraySize"] = "3"
    sweep, arrays = place.start("sweep.workers=7")
    assert [(one.args[0], one.words) for one in place.slurm.submissions] == [
        ("--array=0-2", ()),
        ("--array=0-2", ("3",)),
        ("--array=0", ("6",)),
    ]
    assert (arrays.jobs[4], arrays.jobs[6]) == ("101_1", "102_0")
    assert sweep.record.job_ids == ["100", "101", "102"]


def test_chunks_split_indices_at_multiples_of_the_size() -> None:
    assert chunks([0, 1, 4, 5, 9], 4) == [[0, 1], [4, 5], [9]]


@pytest.mark.parametrize(("limit", "sizes"), [(5, [4, 1]), (7, [4, 2, 1]), (1, [1])])
def test_start_submits_as_many_workers_as_the_submit_limit_allows(place: Place, limit: int, sizes: list[int]) -> None:
    place.slurm.most_tasks = limit
    sweep, arrays = place.start("sweep.workers=8")
    assert [len(_range(one.args[0])) for one in place.slurm.submissions] == sizes
    assert len(arrays.jobs) == limit == sweep.record.array_size
    assert arrays.refusal == "QOSMaxSubmitJobPerUserLimit"
    assert sweep.dir.worker_indices() == list(range(limit))


def _range(option: str) -> range:
    first, _, last = option.removeprefix("--array=").partition("-")
    return range(int(first), int(last or first) + 1)


def test_start_without_any_accepted_worker_leaves_nothing(place: Place) -> None:
    place.slurm.most_tasks = 0
    with pytest.raises(ClusterError, match="QOSMaxSubmitJobPerUserLimit"):
        place.start()
    assert not place.runs.exists()


def test_refusal_of_a_later_array_cancels_the_earlier_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.slurm.settings["MaxArraySize"] = "2"
    sbatch = place.slurm.sbatch

    def refuses_the_second(*args: object, **options: object) -> str:
        if place.slurm.submissions:
            raise ClusterError("Slurm refused the job: Invalid account")
        return str(sbatch(*args, **options))

    monkeypatch.setattr(place.slurm, "sbatch", refuses_the_second)
    with pytest.raises(ClusterError, match="Invalid account"):
        place.start()
    assert place.slurm.cancelled == ["100"]
    assert not place.runs.exists()


def test_start_without_slurm_configuration_leaves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = place.plan()

    def silent() -> dict[str, str]:
        raise SlurmCommandError(["scontrol"], 124, "no answer within 60 s")

    monkeypatch.setattr(place.slurm, "config", silent)
    with pytest.raises(SlurmUnreachable, match=r"no answer within 60 s$"):
        start_sweep.start_sweep(plan)
    assert not place.runs.exists()


def test_array_that_cannot_be_cancelled_keeps_its_directory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.slurm.settings["MaxArraySize"] = "2"
    sbatch = place.slurm.sbatch

    def goes_away(*args: object, **options: object) -> str:
        if place.slurm.submissions:
            place.slurm.unreachable = "Unable to contact slurm controller"
        return str(sbatch(*args, **options))

    monkeypatch.setattr(place.slurm, "sbatch", goes_away)
    with pytest.raises(SlurmCommandError, match="unknown whether Slurm accepted the job"):
        place.start()
    assert [one.script.exists() for one in place.slurm.submissions] == [True]


def test_full_disk_is_reported_and_nothing_is_left(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(start_sweep, "make_worker", full)
    with pytest.raises(RunDirectoryError, match=r"No space left on device\. Nothing was submitted"):
        place.start()
    assert not place.runs.exists()
    assert place.slurm.submissions == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"args.lr": "runtime.mixed_presicion"}, "Did you mean 'mixed_precision'"),
        ({"args.lr: {float: [1.0e-4, 1.0e-1], log: true}": "slurm.nodes: {choice: [1, 2]}"}, "submit --grid"),
        ({"  parameters:\n": "  nothing:\n"}, "sweep.nothing"),
    ],
)
def test_invalid_spec_is_refused_before_anything_is_created(place: Place, change: dict[str, str], message: str) -> None:
    text = SPEC
    for old, new in change.items():
        text = text.replace(old, new)
    Path("sweep.yaml").write_text(text)
    with pytest.raises(SpecError, match=message):
        place.start()
    assert not place.runs.exists()


def test_sweep_with_a_chain_is_refused(place: Place) -> None:
    with pytest.raises(SpecError, match=r"resilience\.chain 3 works in single jobs only"):
        place.start("resilience.chain=3")


def test_foresee_reports_workers_and_files_without_writing(place: Place) -> None:
    place.slurm.settings["MaxArraySize"] = "3"
    told = foresee(place.plan("slurm.gpus_per_node=2", "sweep.max_gpu_hours=5"))
    assert (told.workers, told.arrays, told.trials) == (4, [3, 1], 20)
    assert (told.gpu_hours_per_stay, told.max_gpu_hours) == (8.0, 5.0)
    assert told.first_points == [{"args.lr": 3e-3}]
    assert any(re.fullmatch(r"code/ \(2 files, [\d.]+ k?B\)", name) for name in told.files)
    assert not place.runs.exists()
    assert place.slurm.submissions == []


def test_foresee_counts_the_points_of_a_grid(place: Place) -> None:
    Path("sweep.yaml").write_text(SPEC.replace("method: random", "method: grid").replace("log: true", "step: 0.0333"))
    told = foresee(place.plan("sweep.max_trials=null"))
    assert (told.trials, told.space, len(told.first_points)) == (12, 12, 10)


def test_budget_that_worker_startup_would_use_up_is_refused(place: Place) -> None:
    with pytest.raises(
        SpecError,
        match=r"max_gpu_hours 0\.005 is too low: 4 workers .* would use it up in 4\.5 s, before any trial could start",
    ):
        place.plan("sweep.max_gpu_hours=0.005")
    assert place.plan("sweep.max_gpu_hours=0.005", "sweep.workers=1").workers == 1
    with pytest.raises(SpecError, match=r": 1 worker with 1 rank would use it up .* could start\. Raise it$"):
        place.plan("sweep.max_gpu_hours=0.001", "sweep.workers=1")
