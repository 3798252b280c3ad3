"""Calls that each tracker makes to its package. The packages are stand-ins that record these calls."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

pytestmark = pytest.mark.torch

RUN = "20261120-153012-4f2a"
VALUES = {"loss": torch.tensor(0.5), "text": "hello", "parts": {"a": np.float64(1.0)}, "image": torch.ones(3)}
FEW = {"eval_loss": 0.5}


class Package:
    """Any attribute may be called, set or read; calls are recorded by dotted name."""

    def __init__(self, calls: list[Any], answers: dict[str, Any], path: str = "") -> None:
        self.__dict__.update(_calls=calls, _answers=answers, _path=path)

    def _inner(self, name: str) -> Any:
        path = f"{self._path}.{name}" if self._path else name
        return self._answers[path] if path in self._answers else Package(self._calls, self._answers, path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._inner(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append((self._path, *args, kwargs) if kwargs else (self._path, *args))
        path = f"{self._path}()"
        return self._answers[path] if path in self._answers else Package(self._calls, self._answers, path)

    def __setattr__(self, name: str, value: Any) -> None:
        self._calls.append((f"{self._path}.{name} =", value))

    def __setitem__(self, name: str, value: Any) -> None:
        self._calls.append((f"{self._path}[{name}] =", value))

    def __repr__(self) -> str:
        return self._path


class Only:
    """Equals any dict whose only key is ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and list(other) == [self.name]

    def __hash__(self) -> int:
        return hash(self.name)


class Heard:
    """Starts trackers. A call returns the calls to their package since the last time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, answers: dict[str, Any]) -> None:
        self.calls: list[Any] = []
        self._name = name
        monkeypatch.setitem(sys.modules, name, Package(self.calls, answers))

    def start(self, *arguments: Any, continued: str | None = RUN, **keywords: Any) -> Any:
        before = len(self.calls)
        tracker = LOGGER_TYPE_TO_CLASS[self._name](*arguments, **keywords)
        assert len(self.calls) == before  # no call to the package before the start
        tracker.continued_run = continued
        tracker.start()
        return tracker

    def __call__(self) -> list[Any]:
        calls = [tuple(repr(one) if isinstance(one, Package) else one for one in call) for call in self.calls]
        self.calls.clear()
        return calls


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def make(name: str, **answers: Any) -> Heard:
        return Heard(monkeypatch, name, answers)

    return make


def test_every_tracker_declares_its_name_packages_and_directory() -> None:
    for name, kind in LOGGER_TYPE_TO_CLASS.items():
        assert issubclass(kind, GeneralTracker)
        assert kind.name == name
        assert kind.packages
        assert isinstance(kind.requires_logging_directory, bool)


def test_wandb_gets_config_values_images_and_tables(heard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package = heard("wandb")
    tracker = package.start("project", tags=["a"])
    assert package() == [("init", {"project": "project", "id": RUN, "resume": "allow", "tags": ["a"]})]
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log(FEW, step=3, commit=False)
    tracker.log_images({"picture": ["i", "j"]}, step=4)
    tracker.log_table("table", columns=["a"], data=[[1]])
    tracker.finish()
    assert package() == [
        ("init().config.update", {"lr": 0.1}, {"allow_val_change": True}),
        ("init().log", FEW, {"step": 3, "commit": False}),
        ("Image", "i"),
        ("Image", "j"),
        ("init().log", Only("picture"), {"step": 4}),
        ("Table", {"columns": ["a"], "data": [[1]], "dataframe": None}),
        ("init().log", Only("table"), {"step": None}),
        ("init().finish",),
    ]
    package.start("project", continued=None)
    package.start("project", id="mine")
    monkeypatch.setenv("WANDB_RUN_ID", "a sweep's")
    package.start("project")
    words = {"project": "project"}
    assert package() == [("init", words), ("init", {**words, "id": "mine"}), ("init", words)]


@pytest.mark.parametrize("name", ["trackio", "swanlab"])
def test_trackio_and_swanlab_get_config_and_values(heard: Any, name: str) -> None:
    package = heard(name)
    own_name = "name" if name == "trackio" else "id"
    tracker = package.start("project", colour="red")
    assert package() == [("init", {"project": "project", own_name: RUN, "resume": "allow", "colour": "red"})]
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": torch.tensor([0.5])}, step=3)
    tracker.finish()
    where = "init().config.update" if name == "trackio" else "config.update"
    assert package() == [(where, {"lr": 0.1}), ("init().log", {"loss": 0.5}, {"step": 3}), ("init().finish",)]
    package.start("project", resume="never")
    assert package() == [("init", {"project": "project", "resume": "never"})]


def test_swanlab_gets_texts_and_images(heard: Any) -> None:
    package = heard("swanlab")
    tracker = package.start("project", continued=None)
    tracker.log({"text": "hello"}, step=3)
    tracker.log_images({"picture": ["i"]}, step=4)
    assert package()[1:] == [
        ("Text", "hello"),
        ("init().log", Only("text"), {"step": 3}),
        ("Image", "i"),
        ("init().log", Only("picture"), {"step": 4}),
    ]


def test_comet_gets_an_experiment_key_and_supported_values(heard: Any, caplog: pytest.LogCaptureFixture) -> None:
    package = heard("comet_ml")
    tracker = package.start("project", workspace="w")
    ((_, words),) = package()
    key = words.pop("experiment_key")
    assert words == {"project_name": "project", "workspace": "w"}
    assert key.isalnum()
    assert 32 <= len(key) <= 50
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log(VALUES, step=3)
    tracker.finish()
    assert package() == [
        ("start().log_parameters", {"lr": 0.1}),
        ("start().set_step", 3),
        ("start().log_metric", "loss", 0.5, {"step": 3}),
        ("start().log_other", "text", "hello"),
        ("start().log_metrics", {"a": 1.0}, {"prefix": "parts", "step": 3}),
        ("start().end",),
    ]
    assert "comet_ml accepts only numbers, strings and dicts of numbers: 'image' (Tensor) is not logged" in caplog.text
    package.start("project", online=False)  # offline archives with the same key would replace each other
    assert package() == [("start", {"project_name": "project", "online": False})]


def test_aim_gets_values_with_context_and_images(heard: Any, tmp_path: Any) -> None:
    package = heard("aim")
    tracker = package.start("project", tmp_path / "aim", experiment="e")
    tracker.store_init_configuration({"lr": 0.1, "device": torch.device("cpu")})
    tracker.log({"loss": torch.tensor(0.5), "parts": {"a": 1}, "text": "hello"}, step=3, context={"subset": "val"})
    tracker.log_images({"one": "i", "two": ("j", "a cat")}, step=4, kwargs={"aim_image": {"format": "png"}})
    tracker.finish()
    words = {"step": 3, "context": {"subset": "val"}}
    assert package() == [
        ("Run", {"repo": str(tmp_path / "aim"), "experiment": "e"}),
        ("Run().name =", "project"),
        ("Run()[hparams] =", {"lr": 0.1, "device": "cpu"}),
        ("Run().track", 0.5, {"name": "loss", **words}),
        ("Run().track", 1, {"name": "parts/a", **words}),
        ("Text", "hello"),
        ("Run().track", "Text()", {"name": "text", **words}),
        ("Image", "i", {"caption": "", "format": "png"}),
        ("Run().track", "Image()", {"name": "one", "step": 4}),
        ("Image", "j", {"caption": "a cat", "format": "png"}),
        ("Run().track", "Image()", {"name": "two", "step": 4}),
        ("Run().close",),
    ]


def test_dvclive_resumes_and_gets_values(heard: Any) -> None:
    package = heard("dvclive")
    tracker = package.start("project", dir="d")
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": torch.tensor(0.5), "parts": {"a": 1}}, step=3, plot=False)
    tracker.finish()
    assert package() == [
        ("Live", {"resume": True, "dir": "d"}),  # otherwise it would empty the directory after each requeue
        ("Live().log_params", {"lr": 0.1}),
        ("Live().step =", 3),
        ("Live().log_metric", "loss", 0.5, {"plot": False}),
        ("Live().log_metric", "parts/a", 1, {"plot": False}),
        ("Live().next_step",),
        ("Live().end",),
    ]
    live = Package([], {}, "own")
    assert package.start(live=live).tracker is live
    assert package() == []


def test_clearml_gets_scalars_images_and_tables(
    heard: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = heard("clearml", **{"Task.current_task()": None})
    tracker = package.start("project", task_name="mine")
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"eval_loss": torch.tensor(0.5), "lr": 0.1, "text": "hello"}, step=3)
    tracker.log({"best": 1.0})
    tracker.log_images({"test_picture": "i"}, step=4)
    tracker.log_table("table", columns=["a"], data=[[1]], step=5)
    with pytest.raises(RuntimeMisuse, match="needs data or dataframe"):
        tracker.log_table("table")
    tracker.finish()
    task, logger = "Task.init()", "Task.init().get_logger()"
    said = [call for call in package() if call != (f"{task}.get_logger",)]
    assert said == [
        ("Task.current_task",),
        ("Task.init", {"project_name": "project", "task_name": "mine"}),
        (f"{task}.connect_configuration", {"lr": 0.1}),
        (f"{logger}.report_scalar", {"title": "loss", "series": "eval", "value": 0.5, "iteration": 3}),
        (f"{logger}.report_scalar", {"title": "lr", "series": "train", "value": 0.1, "iteration": 3}),
        (f"{logger}.report_single_value", {"name": "best", "value": 1.0}),
        (f"{logger}.report_image", {"title": "picture", "series": "test", "iteration": 4, "image": "i"}),
        (
            f"{logger}.report_table",
            {"title": "table", "series": "train", "table_plot": [["a"], [1]], "iteration": 5},
        ),
        (f"{task}.close",),
    ]
    assert "clearml accepts only numbers: 'text' (str) is not logged" in caplog.text


def test_clearml_task_of_the_script_is_left_open(heard: Any) -> None:
    package = heard("clearml")
    tracker = package.start("project")
    tracker.finish()
    assert package() == [("Task.current_task",)]
    assert repr(tracker.tracker) == "Task.current_task()"


def test_mlflow_creates_an_experiment_and_tags_the_run(heard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package = heard("mlflow", **{"get_experiment_by_name()": None, "create_experiment()": "7", "search_runs()": []})
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "a"}')
    tracker = package.start("project", tags={"team": "b"})
    tracker.store_init_configuration({"lr": 0.1, "long": "x" * 6001, **{f"p{n}": n for n in range(100)}})
    tracker.log({"loss": torch.tensor(0.5), "parts": {"a": 1}, "text": "hello"}, step=3)
    tracker.log_artifact("file")
    tracker.finish()
    calls = package()
    tags = {"team": "a", "hpcaccel.run": RUN}
    same = f"tags.`hpcaccel.run` = '{RUN}'"
    start = {"run_id": None, "experiment_id": "7", "run_name": None, "nested": False, "tags": tags, "description": None}
    assert calls[:4] == [
        ("get_experiment_by_name", "project"),
        ("create_experiment", "project", {"artifact_location": None, "tags": {"team": "a"}}),
        ("search_runs", ["7"], {"filter_string": same, "max_results": 1, "output_format": "list"}),
        ("start_run", start),
    ]
    assert [(call[0], len(call[1])) for call in calls[4:6]] == [("log_params", 100), ("log_params", 1)]
    assert "long" not in calls[4][1]
    assert calls[6:] == [
        ("log_metrics", {"loss": 0.5, "parts/a": 1}, {"step": 3}),
        ("log_artifact", "file", None),
        ("end_run",),
    ]


def test_mlflow_continues_the_run_of_the_previous_attempt(heard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Package([], {"found.info.run_id": "r1"}, "found")
    answers = {"search_runs()": [found], "get_run().data.params": {"lr": "0.1"}}
    package = heard("mlflow", **answers)
    tracker = package.start("project")
    tracker.store_init_configuration({"lr": 0.2, "new": 1})
    calls = package()
    assert [call[-1]["run_id"] for call in calls if call[0] == "start_run"] == ["r1"]
    assert calls[-1] == ("log_params", {"new": 1})
    monkeypatch.setenv("MLFLOW_RUN_ID", "r2")
    package.start("project", run_id="r3")
    calls = package()
    assert [call[0] for call in calls] == ["get_experiment_by_name", "start_run"]
    assert calls[-1][1]["run_id"] == "r2"
