"""The wheel that is sent to a cluster."""

from __future__ import annotations

import io
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from hpcaccel.errors import UserError
from hpcaccel.submission.remote import archives


def wheel_in(data: bytes) -> zipfile.ZipFile:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        (name,) = [name for name in archive.getnames() if name.endswith(".whl")]
        inside = archive.extractfile(name)
        assert inside is not None
        return zipfile.ZipFile(io.BytesIO(inside.read()))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """hpcaccel as installed by pip, with its list of files, some of which are specific to this machine."""
    site = tmp_path / "site"
    info = site / "hpcaccel-9.9.dist-info"
    files = ["hpcaccel/__init__.py", "hpcaccel/templates/sbatch.j2", "hpcaccel/__pycache__/__init__.pyc"]
    own = [f"{info.name}/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt", "INSTALLER", "direct_url.json")]
    for name in [*files, *own]:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(f"Metadata-Version: 2.1\nName: hpcaccel\nVersion: 9.9\n# {name}\n")
    record = f"{info.name}/RECORD"
    (site / record).write_text("".join(f"{name},,\n" for name in [*files, *own, record, "../../bin/hpcaccel"]))
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(info))
    monkeypatch.setattr("hpcaccel.__file__", str(site / "hpcaccel/__init__.py"))
    return site


def test_installed_hpcaccel_is_packed_unchanged(installed: Path) -> None:
    wheel = wheel_in(archives.archive(None))
    assert set(wheel.namelist()) == {
        "hpcaccel/__init__.py", "hpcaccel/templates/sbatch.j2", "hpcaccel-9.9.dist-info/METADATA",
        "hpcaccel-9.9.dist-info/WHEEL", "hpcaccel-9.9.dist-info/entry_points.txt", "hpcaccel-9.9.dist-info/RECORD",
    }  # fmt: skip
    assert wheel.read("hpcaccel/__init__.py") == (installed / "hpcaccel/__init__.py").read_bytes()
    lines = wheel.read("hpcaccel-9.9.dist-info/RECORD").decode().splitlines()
    assert lines[-1] == "hpcaccel-9.9.dist-info/RECORD,,"
    assert all(",sha256=" in line for line in lines[:-1])


def test_installation_without_a_file_list_is_refused(installed: Path) -> None:
    (installed / "hpcaccel-9.9.dist-info/RECORD").unlink()
    with pytest.raises(UserError, match="does not list its files: pass a wheel with --wheel"):
        archives.archive(None)


def test_missing_or_invalid_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.whl' does not exist"):
        archives.archive(tmp_path / "none.whl")
    for name in ("hpcaccel-0.1.0.tar.gz", "hpcaccel-0.1.0-py3-none-any.whl", "torch-2.13.0-py3-none-any.whl"):
        (tmp_path / name).write_text("no zip file")
        with pytest.raises(UserError, match="is not an hpcaccel wheel"):
            archives.archive(tmp_path / name)
