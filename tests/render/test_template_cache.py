"""The cache of compiled templates: used, private to the user, and never needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.render import context, templates

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


def test_a_cache_that_others_can_write_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, "x={{ value }}")
    monkeypatch.setattr(templates._ShellEnvironment, "compile", None)
    for mode in (0o777, 0o770, 0o702):
        cache.chmod(mode)
        with pytest.raises(TypeError, match="not callable"):
            filled(tmp_path, "x={{ value }}")
    cache.chmod(0o700)
    assert filled(tmp_path, "x={{ value }}") == "x='a b'"
    if os.geteuid() == 0:
        os.chown(cache, 12345, -1)
        with pytest.raises(TypeError, match="not callable"):
            filled(tmp_path, "x={{ value }}")


def test_a_damaged_file_is_replaced(cache: Path, tmp_path: Path) -> None:
    filled(tmp_path, "x={{ value }}")
    (compiled,) = cache.iterdir()
    whole = compiled.read_bytes()
    changed = [whole[:at] + b"\xff" + whole[at + 1 :] for at in range(0, len(whole), 61) if whole[at] != 0xFF]
    truncated = [whole[:length] for length in range(0, len(whole), 61)]
    for damage in (*truncated, *changed, b"\x00" * len(whole)):
        compiled.write_bytes(damage)
        assert filled(tmp_path, "x={{ value }}") == "x='a b'"
        assert compiled.read_bytes() == whole


@pytest.mark.parametrize("what", ["templates.py", "context.py", "jinja", "python"])
def test_an_update_with_the_same_file_times_compiles_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    filled(tmp_path, "x={{ value }}")
    (compiled,) = cache.iterdir()
    before = compiled.read_bytes()
    if what.endswith(".py"):  # wheels give all files the same time
        module = {"templates.py": templates, "context.py": context}[what]
        old, new = Path(str(module.__file__)), tmp_path / what
        new.write_text(old.read_text() + "# changed")
        os.utime(new, ns=(old.stat().st_mtime_ns,) * 2)
        monkeypatch.setattr(module, "__file__", str(new))
    else:
        changed = {"jinja": ("jinja2.__version__", "0.1"), "python": ("importlib.util.MAGIC_NUMBER", b"other")}
        monkeypatch.setattr(*changed[what])
    assert filled(tmp_path, "x={{ value }}") == "x='a b'"
    assert [file.read_bytes() != before for file in cache.iterdir()] == [True]


def test_templates_in_temporary_folders_leave_one_file(cache: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert filled(tmp_path / name, "x={{ value }}") == "x='a b'"
    with pytest.raises(SpecError, match=re.escape(f"{tmp_path / 'b' / 'sbatch.j2'}:2: 'missing' is undefined")):
        filled(tmp_path / "b", "x\n{{ missing }}")
    with pytest.raises(SpecError, match=re.escape(f"{tmp_path / 'a' / 'sbatch.j2'}:2: 'missing' is undefined")):
        filled(tmp_path / "a", "x\n{{ missing }}")
    assert len(list(cache.iterdir())) == 1


def test_a_template_that_extends_another_follows_its_changes(cache: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.j2"
    child = "{% extends 'base.j2' %}{% block inner %}{{ value }}{% endblock %}"
    for text in ("1", "2", "1"):
        base.write_text(text + " {% block inner %}{% endblock %}")
        assert filled(tmp_path, child) == f"{text} 'a b'"
    assert len(list(cache.iterdir())) == 2


def test_processes_share_the_cache(cache: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from hpcaccel.render import templates\n"
        "own = Path(sys.argv[1])\n"
        "for number in range(20):\n"
        "    templates._environment.cache_clear()\n"
        "    assert templates.fill({'value': 'a b'}, own=own) == sys.argv[2]\n"
    )
    started = []
    for name in ("a", "b", "c"):  # they replace each other's file
        own = tmp_path / name / "sbatch.j2"
        own.parent.mkdir()
        own.write_text(name + "={{ value }}")
        started.append(subprocess.Popen([sys.executable, "-c", program, str(own), f"{name}='a b'"]))
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 1


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
        monkeypatch.setattr("hpcaccel.render.template_cache.atomic_write", full)
    assert filled(tmp_path, "x={{ value }}") == "x='a b'"
    assert not (tmp_path / "~nobody-here").exists()
    templates._environment.cache_clear()
