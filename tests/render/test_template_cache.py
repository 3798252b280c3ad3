"""The cache of compiled templates: used, private to the user, and never needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcaccel.render import templates

NAMES = {"value": "a b"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    templates._environment.cache_clear()
    yield tmp_path / "cache" / "hpcaccel" / "templates"
    templates._environment.cache_clear()


def filled(folder: Path, source: str) -> str:
    """The template's text, rendered as a new process would."""
    templates._environment.cache_clear()
    own = folder / "sbatch.j2"
    own.write_text(source)
    return templates.fill(NAMES, own=own)


def test_a_template_is_compiled_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert filled(tmp_path, "x={{ value }}") == "x='a b'"
    (compiled,) = cache.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700
    with monkeypatch.context() as patch:
        patch.setattr(templates._ShellEnvironment, "compile", None)  # compiling fails
        assert filled(tmp_path, "x={{ value }}") == "x='a b'"
    assert filled(tmp_path, "y={{ value }}") == "y='a b'"
    assert list(cache.iterdir()) == [compiled]


def test_a_cache_that_others_can_write_is_not_used(cache: Path, tmp_path: Path) -> None:
    filled(tmp_path, "x={{ value }}")
    (compiled,) = cache.iterdir()
    planted = compiled.read_bytes().replace(b"x=", b"z=")
    assert planted != compiled.read_bytes()
    compiled.write_bytes(planted)
    assert filled(tmp_path, "x={{ value }}") == "z='a b'"  # the file is trusted while the folder is the user's alone
    cache.chmod(0o777)
    assert filled(tmp_path, "x={{ value }}") == "x='a b'"
    cache.chmod(0o700)
    os.chown(cache, 12345, -1) if os.geteuid() == 0 else cache.chmod(0o770)
    assert filled(tmp_path, "x={{ value }}") == "x='a b'"


@pytest.mark.parametrize("damage", [b"", b"j", b"\x00" * 300])
def test_a_damaged_file_is_replaced(cache: Path, tmp_path: Path, damage: bytes) -> None:
    filled(tmp_path, "x={{ value }}")
    (compiled,) = cache.iterdir()
    whole = compiled.read_bytes()
    compiled.write_bytes(damage)
    assert filled(tmp_path, "x={{ value }}") == "x='a b'"
    assert compiled.read_bytes() == whole
    for length in range(0, len(whole), 11):
        compiled.write_bytes(whole[:length])
        assert filled(tmp_path, "x={{ value }}") == "x='a b'"


@pytest.mark.parametrize("home", ["a file", "full", "relative"])
def test_templates_render_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    places = {"a file": str(blocked), "full": str(tmp_path / "cache"), "relative": "~nobody-here"}
    monkeypatch.setenv("XDG_CACHE_HOME", places[home])
    monkeypatch.chdir(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if home == "full":
        monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    assert filled(tmp_path, "x={{ value }}") == "x='a b'"
    assert not (tmp_path / "~nobody-here").exists()
    templates._environment.cache_clear()
