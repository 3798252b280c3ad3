"""Checks of container images at submission: a missing image is an error before the job is queued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.spec import JobSpec
from hpcaccel.submission.entrypoint.images import look_at_image
from hpcaccel.submission.submit.prepare import prepare
from tests.slurm.fake_slurm import FakeSlurm

SKOPEO = """#!/bin/bash
[[ "$1 $2" == "inspect --no-tags" ]] || exit 2
case "${@: -1}" in
    docker://there/is:1) echo sha256:0123;;
    docker://gone/is:1) echo 'level=fatal msg="reading manifest 1: manifest unknown"' >&2; exit 1;;
    *) echo 'level=fatal msg="dial tcp: i/o timeout"' >&2; exit 1;;
esac
"""


def spec(image: str, runtime: str = "auto") -> JobSpec:
    container = {"image": image, "runtime": runtime}
    return JobSpec.model_validate({"name": "a", "entrypoint": {"command": ["true"]}, "container": container})


@pytest.fixture
def skopeo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "skopeo").write_text(SKOPEO)
    (tmp_path / "skopeo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_image_file_must_exist_and_have_a_supported_format(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"torch.sif' does not exist"):
        look_at_image(spec(f"{tmp_path}/torch.sif"), tmp_path)
    (tmp_path / "torch.sif").touch()
    assert look_at_image(spec(f"{tmp_path}/torch.sif"), tmp_path) is not None
    with pytest.raises(SpecError, match="cannot be started by pyxis"):
        look_at_image(spec(f"{tmp_path}/torch.sif", "pyxis"), tmp_path)
    (tmp_path / "torch.tar").touch()
    with pytest.raises(SpecError, match="is not a supported image file"):
        look_at_image(spec(f"{tmp_path}/torch.tar"), tmp_path)


@pytest.mark.usefixtures("skopeo")
def test_image_is_looked_up_in_the_registry(tmp_path: Path) -> None:
    there = look_at_image(spec("there/is:1"), tmp_path)
    assert there is not None
    assert there.advice == ()
    with pytest.raises(SpecError, match=r"gone/is:1' is not available from the registry: .*manifest unknown"):
        look_at_image(spec("gone/is:1"), tmp_path)
    silent = look_at_image(spec("silent/is:1"), tmp_path)
    assert silent is not None
    assert "could not be checked" in silent.advice[0]


def test_missing_skopeo_gives_advice_unless_the_image_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    image = look_at_image(spec("there/is:1"), tmp_path)
    assert image is not None
    assert "skopeo, which queries the registry, is not on PATH" in image.advice[0]
    (tmp_path / ".images").mkdir()
    (tmp_path / ".images" / f"there_is_1-{image.key}.sif").touch()
    again = look_at_image(spec("there/is:1"), tmp_path)
    assert again is not None
    assert again.advice == (), "an earlier run has imported it"


@pytest.mark.usefixtures("skopeo")
@pytest.mark.parametrize("image", ["gone/is:1", "not-there.sif"])
def test_submission_with_a_missing_image_leaves_no_job_and_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "job.yaml").write_text(f"name: a\nentrypoint: {{command: ['true']}}\ncontainer: {{image: {image}}}\n")
    slurm: Any = FakeSlurm()
    with pytest.raises(SpecError, match=r"container.image .*(is not available from the registry|does not exist)"):
        prepare("job.yaml", cluster="slurm", runs_dir=tmp_path / "runs", slurm=slurm)
    assert not slurm.submissions
    assert not (tmp_path / "runs").exists()


def test_mount_path_with_shell_characters_is_rejected_for_pyxis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "torch.sqsh").touch()
    (tmp_path / "job.yaml").write_text(
        "name: a\nentrypoint: {command: ['true']}\n"
        "container: {image: torch.sqsh, runtime: pyxis, mounts: ['/data$(touch x):/data']}\n"
    )
    slurm: Any = FakeSlurm()
    with pytest.raises(SpecError, match=r"pyxis cannot mount .* the path contains \$"):
        prepare("job.yaml", cluster="slurm", runs_dir=tmp_path / "runs", slurm=slurm)
