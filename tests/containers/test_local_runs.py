"""Runs on the local backend in an image with torch but without hpcaccel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.submission import Run
from hpcaccel.submission.submit.api import submit

PROGRAM = (Path(__file__).parent / "programs" / "train.py").read_text()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def job(image: str, **sections: Any) -> dict[str, Any]:
    container = {"image": image, "env": {"GREETING": "from inside"}, **sections.pop("container", {})}
    return {
        "name": "contained",
        "entrypoint": {"script": "train.py"},
        "slurm": {"ntasks_per_node": 1},
        "container": container,
        **sections,
    }


def submitted(here: Path, spec: dict[str, Any]) -> Run:
    import yaml

    (here / "job.yaml").write_text(yaml.safe_dump(spec))
    run = submit("job.yaml", cluster="local", runs_dir=here / "runs")
    assert isinstance(run, Run)
    return run


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.chaos)])
def test_an_image_needs_torch_but_not_hpcaccel(here: Path, image: Path, apptainer: Path, launcher: str) -> None:
    run = submitted(here, job(str(image), launcher=launcher))
    assert run.wait(90).state == "completed", run.dir.slurm_log.read_text() + run.dir.rank_log(1, 0).read_text()
    words = run.dir.rank_log(1, 0).read_text()
    assert f"rank 0 of 1 {here} from inside" in words
    assert f"hpcaccel {run.path}/rank_side/hpcaccel/__init__.py python /usr/bin/python3" in words
    assert [path.name for path in run.dir.checkpoints.iterdir()], "the run directory is there to be written to"
