from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from hpcaccel.errors import SpecError
from hpcaccel.spec import JobSpec, load_spec

settings.register_profile("patient", deadline=None)  # examples can be slow on a loaded machine
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a fixed home, and give each test its own configuration and working directory with a ``train.py``."""
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


Load = Callable[..., JobSpec]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a spec from text. ``name: gpt`` and a script are added, so that a test shows only what it tests."""

    def from_text(text: str, *overrides: str, whole: bool = False) -> JobSpec:
        head = "" if whole else "name: gpt\n" + ("" if "entrypoint:" in text else "entrypoint: {script: train.py}\n")
        (tmp_path / "job.yaml").write_text(head + text, encoding="utf-8")
        return load_spec("job.yaml", overrides=overrides)

    return from_text


@pytest.fixture
def problems(load: Load) -> Callable[..., Sequence[str]]:
    """Return the lines of the error that loading a spec raises."""

    def of_text(text: str, *overrides: str, whole: bool = False) -> Sequence[str]:
        with pytest.raises(SpecError) as caught:
            load(text, *overrides, whole=whole)
        return caught.value.problems

    return of_text
