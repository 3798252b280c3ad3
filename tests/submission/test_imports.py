"""Static detection, by imports, of programs that notice stops through hpcaccel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.run_dir import RunDir
from hpcaccel.runtime.settings import load, locate
from hpcaccel.submission.code.code_copy import plan_code
from hpcaccel.submission.entrypoint.entry import Entry
from hpcaccel.submission.entrypoint.script_lint import used_by
from tests.submission.conftest import Project

HEARS = [
    "from hpcaccel import Accelerator",
    "import hpcaccel\nhpcaccel.Accelerator()",
    "import hpcaccel as hp\nhp.Accelerator()",
    "from hpcaccel.accelerator import Accelerator",
    "import hpcaccel.accelerator\nhpcaccel.accelerator.Accelerator()",
    "from hpcaccel import accelerator\naccelerator.Accelerator()",
    "from hpcaccel import *",
    "try:\n    from hpcaccel import Accelerator\nexcept ImportError:\n    from accelerate import Accelerator",
    "def main():\n    from hpcaccel import Accelerator as A",
    "import hpcaccel\nwhile not hpcaccel.should_stop(): ...",
]
DEAF = [
    "import torch",
    "import hpcaccel\nhpcaccel.log({})",
    "from accelerate import Accelerator\nAccelerator()",
    "import accelerate, hpcaccel\naccelerate.Accelerator(); hpcaccel.log({})",
    "# from hpcaccel import Accelerator",
    "text = 'from hpcaccel import Accelerator'",
    "this is no python",
]


def hears(folder: Path, script: str, *, name: str = "train.py", copy: bool = True) -> bool:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(script)
    return used_by(Entry(folder / name, folder), plan_code(folder) if copy else None).notices_stops


@pytest.mark.parametrize(("script", "expected"), [*((s, True) for s in HEARS), *((s, False) for s in DEAF)])
def test_use_of_hpcaccel_is_detected_in_the_script(tmp_path: Path, script: str, expected: bool) -> None:
    assert hears(tmp_path, script) is expected


ELSEWHERE = [
    ("loop.py", "import loop"),
    ("loop.py", "from loop import run"),
    ("lib/loop.py", "import lib.loop"),
    ("lib/loop.py", "from lib import loop"),
    ("lib/__init__.py", "from lib.anything import run"),
    ("lib/loop/__init__.py", "from lib.loop import run"),
    ("src/mine/loop.py", "from mine.loop import run"),
    ("loop.py", "import importlib\nimportlib.import_module('loop')"),
]


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(("file", "script"), ELSEWHERE)
def test_use_of_hpcaccel_is_detected_in_imported_files(tmp_path: Path, file: str, script: str, copy: bool) -> None:
    hears(tmp_path, HEARS[0], name=file)
    assert hears(tmp_path, script, copy=copy)
    assert not hears(tmp_path, "import torch", copy=copy), "a file that it does not import"


def test_imports_are_followed_recursively(tmp_path: Path) -> None:
    for name, text in {
        "lib/__init__.py": "",
        "lib/a.py": "from . import b",
        "lib/b.py": "from .deep.c import run\nimport train",
        "lib/deep/c.py": "from ...other import x\nfrom ..d import y",
        "lib/d.py": HEARS[0],
    }.items():
        hears(tmp_path, text, name=name)
    assert hears(tmp_path, "import lib.a")


def test_imports_are_resolved_in_the_folder_of_the_script(tmp_path: Path) -> None:
    hears(tmp_path, HEARS[0], name="tools/loop.py")
    assert hears(tmp_path, "import loop", name="tools/train.py")
    assert not hears(tmp_path, "import loop", name="train.py")


def launched(project: Project, script: str, *overrides: str) -> dict[str, Any]:
    project.write("train.py", script)
    spec = (project.path / "job.yaml").read_text().replace("runtime: {stop: signals}\n", "")
    project.write("job.yaml", spec)
    run = project.queue(*overrides)
    launch: dict[str, Any] = json.loads(RunDir(run.path).spec.read_text())["launch"]  # type: ignore[union-attr]
    return launch


@pytest.mark.parametrize(
    ("script", "overrides", "stop"),
    [
        (HEARS[0], (), "cooperative"),
        (DEAF[0], (), "signals"),
        (DEAF[1], (), "signals"),
        (DEAF[0], ("runtime.stop=cooperative",), "cooperative"),
        (HEARS[0], ("runtime.stop=signals",), "signals"),
    ],
)
def test_stop_mode_depends_on_the_script_and_the_setting(
    project: Project, script: str, overrides: tuple[str, ...], stop: str
) -> None:
    assert launched(project, script, *overrides)["stop"] == stop


@pytest.mark.parametrize(("script", "shielded"), [(HEARS[0], False), (DEAF[0], True)])
def test_ranks_stopped_by_signals_get_the_loader_shield(project: Project, script: str, shielded: bool) -> None:
    launch = launched(project, script)
    folder = launch["loader_shield"]
    assert (folder is not None and Path(folder, "sitecustomize.py").is_file()) is shielded


@pytest.mark.parametrize(
    ("launch", "stop"),
    [
        ({"stop": "signals", "stop_is_default": True}, "cooperative"),
        ({"stop": "signals", "stop_is_default": False}, "signals"),
        ({"stop": "signals"}, "signals"),
        ({"stop": "cooperative", "stop_is_default": True}, "cooperative"),
    ],
)
def test_undetected_accelerator_defaults_to_cooperative_stop(tmp_path: Path, launch: dict[str, Any], stop: str) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    spec = {"runtime": {"stop": None}, "entrypoint": {"script": "train.py"}}
    common = {
        "kind": "program", "program": [], "workdir": "/", "backend": "local", "nodes": 1, "ranks_per_node": 1,
    }  # fmt: skip
    write_json(run.spec, {"version": 1, "spec": spec, "launch": {**common, **launch}})
    assert load(locate(None, {"HPCACCEL_RUN_DIR": str(run.path), "RANK": "0"})).stop == stop
