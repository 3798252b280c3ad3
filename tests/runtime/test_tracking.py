"""Trackers: which are available, when they start, which calls they get, and how they continue after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.enums import LoggerType
from hpcaccel.runtime.states.accelerator_state import AcceleratorState
from hpcaccel.runtime.tracking import catalog
from hpcaccel.runtime.tracking.hub import Tracking
from hpcaccel.runtime.training.metrics_writer import MetricsWriter
from hpcaccel.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    filter_trackers,
    get_available_trackers,
    on_main_process,
    register_tracker_class,
)
from tests.runtime.ranks import make_run, metrics, run_ranks

pytestmark = pytest.mark.torch

HERE: set[str] = set()
"""Packages that count as installed in these tests."""


class Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = False

    def __init__(self, project: str = "", *arguments: Any, **keywords: Any) -> None:
        super().__init__()
        self.project = project
        self.heard: list[Any] = [[project, *arguments, keywords]] if project else []

    @property
    def tracker(self) -> list[Any]:
        return self.heard

    def start(self) -> None:
        self.heard.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.heard.append(values)

    def resumed(self, step: int) -> None:
        self.heard.append(f"resumed {step}")

    def flush(self) -> None:
        self.heard.append("flush")

    def finish(self) -> None:
        self.heard.append("finish")


class Directory(Recorder):
    name = "directory"
    requires_logging_directory = True


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    HERE.clear()
    monkeypatch.setattr(catalog, "_is_importable", lambda package: package in HERE)
    for name in ("recorder", "directory"):  # registrations end with their test
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Recorder)
        monkeypatch.delitem(LOGGER_TYPE_TO_CLASS, name)


def hub(*, is_main: bool = True, run_id: str | None = None) -> tuple[Tracking, list[GeneralTracker], MetricsWriter]:
    trackers: list[GeneralTracker] = []
    writer = MetricsWriter(None, attempt=1)
    return Tracking(trackers, writer, is_main=is_main, run_id=run_id), trackers, writer


# -- choice of trackers --------------------------------------------------------------------------------------------


def test_tracker_without_its_package_is_skipped_with_an_install_hint() -> None:
    HERE.add("tensorboardX")
    said = r"log_with='wandb': the package wandb is not installed, so .* skipped\. Install it with: pip install wandb"
    with pytest.warns(UserWarning, match=said):
        assert filter_trackers(["wandb", "tensorboard", LoggerType.TENSORBOARD], "logs") == [LoggerType.TENSORBOARD]


def test_only_rank_0_warns_of_a_missing_tracker_package() -> None:
    other, _, _ = hub(is_main=False)
    other.want("wandb", None)
    assert other.wanted == []
    main, _, _ = hub()
    with pytest.warns(UserWarning, match="pip install wandb"):
        main.want("wandb", None)


def test_directory_named_like_a_tracker_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "swanlab").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not catalog.is_installed(LOGGER_TYPE_TO_CLASS["swanlab"])


def test_unknown_tracker_error_lists_the_known_names() -> None:
    with pytest.raises(
        RuntimeMisuse, match=r"log_with='wandbb' is not a tracker. Use one of: all, aim, .*tensorboard, wandb"
    ):
        filter_trackers("wandbb", "logs")
    with pytest.raises(RuntimeMisuse, match=r"log_with=3 is not a tracker"):
        filter_trackers([3])


def test_file_writing_tracker_needs_a_logging_directory() -> None:
    with pytest.raises(RuntimeMisuse, match=r"log_with='tensorboard' needs a logging directory.*project_dir"):
        filter_trackers("tensorboard")


def test_log_with_all_uses_every_available_tracker() -> None:
    HERE.update({"wandb", "tensorboard"})
    own = Recorder()
    assert get_available_trackers() == [LoggerType.TENSORBOARD, LoggerType.WANDB]
    assert filter_trackers(["all", own], "logs") == [own, LoggerType.TENSORBOARD, LoggerType.WANDB]
    with pytest.warns(UserWarning, match="log_with='all' skips 'tensorboard', which needs a logging directory"):
        assert filter_trackers(LoggerType.ALL) == [LoggerType.WANDB]


def test_registered_tracker_class_is_found_by_name() -> None:
    register_tracker_class(Directory)
    with pytest.warns(UserWarning, match="'directory' is now Directory, instead of Directory"):
        register_tracker_class(Directory)
    tracking, trackers, _ = hub()
    tracking.want("directory", "logs")
    tracking.start("project", None, {"directory": {"colour": "red"}})
    assert trackers[0].heard[:2] == [["project", "logs", {"colour": "red"}], "start"]  # type: ignore[attr-defined]
    tracking.finish()


@pytest.mark.parametrize("wrong", [dict, Recorder(), type("Nameless", (GeneralTracker,), {})])
def test_invalid_tracker_class_cannot_be_registered(wrong: Any) -> None:
    with pytest.raises(RuntimeMisuse, match="register_tracker_class"):
        register_tracker_class(wrong)


def test_incomplete_tracker_class_error_names_what_is_missing() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(RuntimeMisuse, match="the tracker Half has no requires_logging_directory and no tracker"):
        Half()


# -- life cycle ------------------------------------------------------------------------------------------------------


def test_tracker_gets_all_calls_in_order_and_none_before_its_start() -> None:
    tracking, trackers, writer = hub()
    one, two = Recorder(), Recorder()
    tracking.want([one, two, one], None)
    assert (trackers, one.heard) == ([], [])
    tracking.start("project", {"lr": 0.1}, {})
    writer.flush()
    writer.resume({"first_loss": None, "last_loss": None, "step": 7})
    tracking.finish()
    tracking.finish()
    assert one.heard == ["start", {"lr": 0.1}, "flush", "resumed 7", "finish"]
    assert trackers == [one, two]
    writer.flush()
    assert one.heard[-1] == "finish"


def test_tracker_started_after_a_resume_gets_the_resumed_step() -> None:
    tracking, _, writer = hub()
    writer.resume({"first_loss": None, "last_loss": None, "step": 7})
    own = Recorder()
    tracking.want(own, None)
    tracking.start("project", None, {})
    assert own.heard == ["start", "resumed 7"]
    tracking.finish()


def test_all_trackers_are_finished_even_if_one_fails() -> None:
    class Broken(Recorder):
        def finish(self) -> None:
            raise OSError("disk full")

    tracking, _, _ = hub()
    broken, own = Broken(), Recorder()
    tracking.want([broken, own], None)
    tracking.start("project", None, {})
    with pytest.raises(OSError, match="disk full"):
        tracking.finish()
    assert own.heard == ["start", "finish"]


def test_second_tracker_start_finishes_the_first_and_gets_a_new_run_id() -> None:
    register_tracker_class(Recorder)
    tracking, trackers, _ = hub(run_id="20261120-153012-4f2a")
    tracking.want("recorder", None)
    tracking.start("first", None, {})
    first = trackers[0]
    tracking.start("second", None, {})
    assert first.heard[-1] == "finish"  # type: ignore[attr-defined]
    assert [tracker.project for tracker in trackers] == ["second"]  # type: ignore[attr-defined]
    assert (first.continued_run, trackers[0].continued_run) == ("20261120-153012-4f2a", "20261120-153012-4f2a-2")
    tracking.finish()


def test_other_ranks_start_no_tracker_and_get_a_silent_one() -> None:
    tracking, trackers, _ = hub(is_main=False)
    own = Recorder()
    tracking.want(own, None)
    tracking.start("project", {"lr": 0.1}, {})
    assert (trackers, own.heard) == ([], [])
    silent = tracking.get("wandb", unwrap=True)
    silent.log({"a": 1}, step=3)
    silent.config["lr"] = 0.1
    assert silent.log_artifact("file").wait() is silent
    assert list(silent.history()) == []


def test_skipped_tracker_is_replaced_by_a_silent_one() -> None:
    tracking, _, _ = hub()
    with pytest.warns(UserWarning, match="pip install wandb"):
        tracking.want(["wandb", Recorder()], None)
    tracking.start("project", None, {})
    tracking.get("wandb", unwrap=True).watch(None)
    assert tracking.get("recorder", unwrap=False).name == "recorder"
    with pytest.raises(RuntimeMisuse, match=r"get_tracker\('aim'\): there is no such tracker .*\(trackers: recorder\)"):
        tracking.get("aim", unwrap=False)
    tracking.finish()


def test_early_get_tracker_and_mistyped_init_kwargs_warn() -> None:
    tracking, _, _ = hub()
    tracking.want(Recorder(), None)
    with pytest.warns(UserWarning, match=r"get_tracker\('recorder'\) was called before init_trackers"):
        tracking.get("recorder", unwrap=False)
    with pytest.warns(UserWarning, match=r"init_kwargs\['wanbd'\] is ignored: no such tracker \(available: .*wandb"):
        tracking.start("project", None, {"wanbd": {"tags": []}, "wandb": {}})
    tracking.finish()


def test_on_main_process_method_runs_on_the_main_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loud(Recorder):
        @on_main_process
        def say(self) -> str:
            return "said"

    AcceleratorState._reset_state(reset_partial_state=True)  # left by an earlier test
    tracker = Loud()
    assert tracker.say() == "said"
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert tracker.say() is None
    tracker.main_process_only = False
    assert tracker.say() == "said"


# -- real ranks -------------------------------------------------------------------------------------------------------


def scalars(run: RunDir, name: str) -> list[tuple[int, float]]:
    """The steps and values that TensorBoard shows of a scalar."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run.trackers / "digits"), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


def interrupted(tmp_path: Path, *arguments: str, size: int) -> tuple[RunDir, list[Any]]:
    """A run whose first attempt was killed one step after its checkpoint, and the calls that its tracker recorded."""
    run = make_run(tmp_path / "run", checkpoint={"every_steps": 2, "background": False})
    heard = tmp_path / "heard.json"
    first = run_ranks("trackers.py", [str(heard), "--die-at", "3", *arguments], size=size, run=run)
    assert first.codes[0] == -9, first.outputs
    second = run_ranks("trackers.py", [str(heard), "--die-at", "3", *arguments], size=size, run=run, attempt=2)
    assert second.codes == [0] * size, second.outputs
    assert second.result() == {"trackers": ["tensorboard", "recorder"], "wanted": 2}
    assert all('"trackers": []' in output for output in second.outputs[1:])
    return run, json.loads(heard.read_text())


def test_trackers_on_two_ranks_continue_after_a_requeue(tmp_path: Path) -> None:
    run, heard = interrupted(tmp_path, size=2)
    assert heard == [
        ["config", {"lr": 0.1, "layers": [1, 2]}],
        [["accuracy"], None, {}],
        ["resumed", 2],
        *([["attempt", "loss"], step, {}] for step in (3, 3, 4, 4)),
        ["own", 0],
    ]
    assert metrics(run, "attempt") == {1: 1, 2: 1, 3: 2, 4: 2}
    assert metrics(run, "accuracy") == {0: 0.0, 2: 0.5}
    assert metrics(run, "parts/b") == {2: 2.0}
    assert scalars(run, "attempt") == [(1, 1), (1, 1), (2, 1), (2, 1), (3, 2), (3, 2), (4, 2), (4, 2)]
    assert scalars(run, "accuracy") == [(0, 0.0), (2, 0.5), (0, 0.0)]


def test_scripts_own_step_numbers_are_kept_after_a_requeue(tmp_path: Path) -> None:
    run, _ = interrupted(tmp_path, "--own-steps", size=1)
    shown = [*((step, 1) for step in range(1, 5)), *((step, 2) for step in range(5, 9))]
    assert scalars(run, "attempt") == shown
    assert metrics(run, "attempt") == dict(shown)


def test_tensorboard_tracker_writes_its_files(tmp_path: Path) -> None:
    import torch
    import yaml
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from hpcaccel.tracking import TensorBoardTracker

    tracker = TensorBoardTracker("project", tmp_path, flush_secs=60)
    assert list(tmp_path.iterdir()) == []
    tracker.start()
    config = {
        "lr": 1e-5,
        "layers": [1, 2],
        "kind": LoggerType.WANDB,
        "deep": {"device": torch.device("cpu")},
        "n": None,
    }
    tracker.store_init_configuration(config)
    tracker.log({"loss": torch.tensor([0.5]), "text": "hello", "both": {"a": torch.tensor(1.0), "b": 2}}, step=5)
    tracker.log_images({"picture": torch.zeros(2, 3, 4, 4)}, step=5)
    tracker.flush()
    (folder,) = tmp_path.glob("project/*/hparams.yml")
    kept = {"lr": 1e-5, "layers": [1, 2], "kind": "wandb", "deep": {"device": "cpu"}, "n": None}
    assert yaml.safe_load(folder.read_text()) == kept
    board = EventAccumulator(str(tmp_path / "project")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(5, 0.5)]
    assert set(board.Tags()["images"]) == {"picture"}
    assert "text/text_summary" in board.Tags()["tensors"]
    for part, value in {"a": 1.0, "b": 2.0}.items():
        lines = EventAccumulator(str(tmp_path / "project" / f"both_{part}")).Reload()
        assert [event.value for event in lines.Scalars("both")] == [value]
    tracker.finish()
    assert tracker.tracker is tracker.writer
