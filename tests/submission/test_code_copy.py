"""The code copy: which files are copied, and how links are handled."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.submission.code import code_copy
from hpcaccel.submission.code.code_copy import copy_code, plan_code


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "code"
    root.mkdir()
    return root


def write(root: Path, *names: str, size: int = 1) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)


def git(root: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=b", *words], check=True, capture_output=True
    )


def names(root: Path, **options: object) -> set[str]:
    return {str(name) for name in plan_code(root, **options).files}  # type: ignore[arg-type]


def test_all_files_except_non_code_are_copied_outside_git(root: Path) -> None:
    write(root, "train.py", "data/words.txt", ".hidden", "pkg/a.py")
    write(root, "__pycache__/a.pyc", "pkg/b.pyc", ".venv/x.py", "node_modules/y.js", "wandb/run", "checkpoints/s/f")
    write(root, "env/pyvenv.cfg", "env/lib/z.py", "old/node.pyz", "old/spec.json")
    assert names(root) == {"train.py", "data/words.txt", ".hidden", "pkg/a.py"}


def test_package_named_like_a_results_folder_is_copied(root: Path) -> None:
    write(root, "lib/checkpoints/__init__.py", "checkpoints/model.bin")
    assert names(root) == {"lib/checkpoints/__init__.py"}


def test_runs_dir_is_never_copied(root: Path) -> None:
    write(root, "train.py", "results/here/run/file")
    assert names(root, runs_dir=root / "results") == {"train.py"}


def test_tracked_and_unignored_files_are_copied_in_git(root: Path) -> None:
    git(root, "init", "-q")
    write(root, "train.py", "gone.py", "runs/tracked.py", "ignored.bin", "new.py", "wandb/log", "a.pyc")
    (root / ".gitignore").write_text("*.bin\n")
    git(root, "add", "train.py", "gone.py", "runs/tracked.py", ".gitignore")
    (root / "gone.py").unlink()
    assert names(root) == {"train.py", "runs/tracked.py", ".gitignore", "new.py"}


def test_gitignore_applies_to_a_subfolder_of_the_work_tree(root: Path) -> None:
    git(root, "init", "-q")
    write(root, "top.py", "jobs/train.py", "jobs/skip.bin")
    (root / ".gitignore").write_text("*.bin\n")
    assert names(root / "jobs") == {"train.py"}


def test_nested_git_repository_is_copied(root: Path) -> None:
    git(root, "init", "-q")
    write(root, "train.py", "inner/lib.py")
    git(root / "inner", "init", "-q")
    assert names(root) == {"train.py", "inner/lib.py"}


def test_include_adds_files_and_exclude_overrides_it(root: Path) -> None:
    git(root, "init", "-q")
    (root / ".gitignore").write_text("data/\n")
    write(root, "train.py", "notes/a.md", "data/train.bin", "data/raw/huge.bin")
    found = names(root, include=["data"], exclude=["raw", "*.md", ".gitignore"])
    assert found == {"train.py", "data/train.bin"}


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("data", {"a.py", "lib/b.py"}),
        ("*.bin", {"a.py", "lib/b.py"}),
        ("lib/data/", {"a.py", "lib/b.py", "data/x.bin"}),
        ("/data", {"a.py", "lib/b.py", "lib/data/y.bin"}),
        ("**/y.bin", {"a.py", "lib/b.py", "data/x.bin"}),
    ],
)
def test_exclude_pattern_leaves_out_matching_files(root: Path, pattern: str, left: set[str]) -> None:
    write(root, "a.py", "lib/b.py", "data/x.bin", "lib/data/y.bin")
    assert names(root, exclude=[pattern]) == left


def test_include_outside_the_code_folder_is_refused(root: Path) -> None:
    with pytest.raises(SpecError, match="must be a path in the code folder"):
        plan_code(root, include=["../secrets"])


def test_entrypoint_is_copied_even_if_ignored_or_excluded(root: Path) -> None:
    git(root, "init", "-q")
    (root / ".gitignore").write_text("*\n")
    write(root, "train.py", "other.py")
    assert names(root, entrypoint=root / "train.py", exclude=["*.py"]) == {"train.py"}


def test_code_above_the_size_limit_is_refused_with_its_largest_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_copy, "MAX_BYTES", 10_000)
    write(root, "train.py")
    write(root, "data/big.bin", size=20_000)
    with pytest.raises(SpecError, match=r"\d k?B  data/big\.bin(.|\n)*code\.exclude: \['data/big\.bin'\]"):
        plan_code(root)


def test_code_above_the_file_limit_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_copy, "MAX_FILES", 3)
    write(root, *(f"f{number}" for number in range(5)))
    with pytest.raises(SpecError, match="more than 3 files"):
        plan_code(root)


def test_excluded_files_do_not_count_towards_the_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_copy, "MAX_FILES", 3)
    write(root, "train.py", *(f"data/f{number}" for number in range(5)))
    assert names(root, exclude=["data"]) == {"train.py"}


def test_copy_keeps_modes_and_contents(root: Path, tmp_path: Path) -> None:
    write(root, "run.sh", size=3)
    (root / "run.sh").chmod(0o755)
    copy_code(plan_code(root), tmp_path / "copy")
    assert (tmp_path / "copy" / "run.sh").read_bytes() == b"xxx"
    assert os.access(tmp_path / "copy" / "run.sh", os.X_OK)


def test_links_are_kept_or_replaced_by_copies_of_their_files(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write(outside, "file.txt", "set/big.bin", size=5)
    write(root, "lib/real.py", "wandb/log")
    (root / "near.py").symlink_to("lib/real.py")
    (root / "absolute.py").symlink_to(root / "lib" / "real.py")
    (root / "package").symlink_to("lib")
    (root / "far.txt").symlink_to(outside / "file.txt")
    (root / "data").symlink_to(outside / "set")
    (root / "log").symlink_to("wandb/log")
    copy = tmp_path / "copy"
    copy_code(plan_code(root), copy)
    assert os.readlink(copy / "near.py") == "lib/real.py"
    assert os.readlink(copy / "absolute.py") == "lib/real.py"
    assert os.readlink(copy / "package") == "lib"
    assert (copy / "far.txt").read_bytes() == b"xxxxx"
    assert not (copy / "far.txt").is_symlink()
    assert os.readlink(copy / "data") == str(outside / "set")
    assert (copy / "log").read_bytes() == b"x"


def test_named_pipes_are_left_out(root: Path) -> None:
    write(root, "train.py")
    os.mkfifo(root / "pipe")
    assert names(root) == {"train.py"}


def test_path_in_the_copy_is_none_for_files_not_copied(root: Path, tmp_path: Path) -> None:
    write(root, "sub/train.py", "left.py")
    plan = plan_code(root, exclude=["left.py"])
    copy = tmp_path / "copy"
    assert plan.in_copy(root / "sub" / "train.py", copy) == copy / "sub" / "train.py"
    assert plan.in_copy(root / "left.py", copy) is None
    assert plan.in_copy(tmp_path / "elsewhere.py", copy) is None


@pytest.mark.parametrize("in_git", [False, True], ids=["no git", "git"])
def test_core_dumps_are_left_out_and_files_named_core_are_copied(root: Path, in_git: bool) -> None:
    if in_git:
        git(root, "init", "-q")
    write(root, "train.py", "core/__init__.py", "core.py", "lib/core")
    core = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x04\x00" + bytes(code_copy.MAX_BYTES)
    for name in ("core.4711", "lib/core.12"):
        (root / name).write_bytes(core)
    assert names(root) == {"train.py", "core/__init__.py", "core.py", "lib/core"}
