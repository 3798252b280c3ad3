"""The copy of the user's code: a requeued job runs the submitted code, even if the original is edited.

In a git work tree, tracked files and untracked files that are not ignored are copied; elsewhere, all files are.
Untracked files that are clearly not code are left out. ``code.include`` adds files, ``code.exclude`` removes files, and
the entrypoint is always copied.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.formatting import size
from hpcaccel.errors import RunDirectoryError, SpecError

__all__ = ["MAX_BYTES", "MAX_FILES", "SENT_CODE", "CodePlan", "copy_code", "plan_code", "sent_files"]

MAX_BYTES = 200 * 1024**2
MAX_FILES = 20_000
SENT_CODE = ".code"
"""Folder in ``runs_dir`` for code from other machines. It has a folder and a JSON list of files per content hash."""

_NEVER = {".git", ".hg", ".svn"}
_NO_CODE = {
    "__pycache__", ".venv", "venv", "node_modules", ".ipynb_checkpoints", ".eggs", ".tox", ".nox",
    ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".DS_Store",
}  # fmt: skip
_OUTPUT = {"checkpoints", "wandb", "runs", "outputs", "mlruns", "lightning_logs", "tensorboard"}
"""Names of folders with results. Untracked files in them are left out, unless the folder is a Python package."""
_NO_CODE_SUFFIXES = {".pyc", ".pyo", ".sif"}
_ET_CORE = 4


@dataclass(frozen=True, kw_only=True)
class CodePlan:
    """The files to copy. Paths in ``files`` are relative to ``root``."""

    root: Path
    files: tuple[PurePosixPath, ...]
    total_bytes: int

    def in_copy(self, path: Path, copy: Path) -> Path | None:
        """The path of the file ``path`` in the copy at ``copy``; None if the file is not copied."""
        for form in (path.absolute(), path.resolve()):
            for root in (self.root, self.root.resolve()):
                if form.is_relative_to(root) and PurePosixPath(form.relative_to(root).as_posix()) in self._names:
                    return copy / form.relative_to(root)
        return None

    @property
    def _names(self) -> frozenset[PurePosixPath]:
        return frozenset(self.files)


def plan_code(
    root: Path,
    *,
    entrypoint: Path | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    runs_dir: Path | None = None,
) -> CodePlan:
    """Choose the files of ``root`` to copy; nothing is written.

    Args:
        entrypoint: a file below ``root`` that is always copied.
        include: globs relative to ``root`` of files and folders to copy even if git or the defaults leave them out.
        exclude: globs of files or folders to leave out.
        runs_dir: the folder of run directories, which is left out except for files that ``include`` matches.

    Raises:
        SpecError: the code exceeds ``MAX_BYTES`` or ``MAX_FILES``, or ``include`` has an invalid pattern.
    """
    if (sent := sent_files(root)) is not None:
        names = {PurePosixPath(name) for name in sent}
        total = sum(_size(root / name) or 0 for name in names)
        return CodePlan(root=root, files=tuple(sorted(names)), total_bytes=total)
    names = set(_base_files(root, runs_dir, exclude))
    names.update(_included(root, include))
    names = {name for name in names if not _matches_any(name, exclude)}
    if entrypoint is not None and entrypoint.is_relative_to(root):
        names.add(PurePosixPath(entrypoint.relative_to(root).as_posix()))
    sizes = {name: size for name in names if (size := _size(root / name)) is not None}
    total = sum(sizes.values())
    if total > MAX_BYTES or len(sizes) > MAX_FILES:
        raise SpecError(_too_much(root, sizes, total))
    return CodePlan(root=root, files=tuple(sorted(sizes)), total_bytes=total)


def sent_files(root: Path) -> list[str] | None:
    """The files of a code folder that another machine sent, relative to ``root``; None for other folders."""
    if root.parent.name != SENT_CODE:
        return None
    listed = read_json(root.with_suffix(".json"))
    return None if listed is None else list(listed["files"])


def copy_code(plan: CodePlan, destination: Path) -> None:
    """Copy the planned files to ``destination``, which must not exist.

    Symbolic links to targets inside the copy stay links. A link to another file is replaced by a copy of the file, a
    link to another folder (such as a data set) by an absolute link.

    Raises:
        RunDirectoryError: a file is not readable.
    """
    destination.mkdir(mode=0o750)
    present = _with_folders(plan.files)
    for name in plan.files:
        source, target = plan.root / name, destination / name
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        try:
            if source.is_symlink():
                _copy_link(source, target, root=plan.root, present=present)
            else:
                shutil.copy2(source, target)
        except FileNotFoundError:
            continue  # deleted in the meantime, such as an editor's temporary file
        except PermissionError as error:
            raise RunDirectoryError(
                f"cannot copy {source}: {error.strerror}. Exclude it with code.exclude: [{str(name)!r}]"
            ) from None


def _copy_link(source: Path, target: Path, *, root: Path, present: set[PurePosixPath]) -> None:
    to = source.resolve()
    real_root = root.resolve()
    if to.is_relative_to(real_root):
        inside = PurePosixPath(to.relative_to(real_root).as_posix())
        if inside in present:
            real_parent = source.parent.resolve()
            target.symlink_to(os.path.relpath(to, real_parent))
            return
    if to.is_file():
        shutil.copy2(to, target)
    else:
        target.symlink_to(to)


def _with_folders(names: Iterable[PurePosixPath]) -> set[PurePosixPath]:
    found: set[PurePosixPath] = set()
    for name in names:
        found.add(name)
        found.update(name.parents)
    return found


# -- which files ----------------------------------------------------------------------------------------------------


def _base_files(root: Path, runs_dir: Path | None, exclude: Sequence[str]) -> Iterator[PurePosixPath]:
    tracked = _git_files(root, "--cached")
    if tracked is None:
        yield from _walk(root, root, runs_dir, exclude)
        return
    untracked = _git_files(root, "--others", "--exclude-standard") or []
    wanted = [*tracked, *(name for name in untracked if not _is_no_code(root, name))]
    for name in wanted:
        path = root / name
        if _is_below(path, runs_dir):
            continue
        if path.is_dir() and not path.is_symlink():  # a submodule, or another repository inside this one
            yield from _walk(root, path, runs_dir, exclude)
        else:
            yield name


def _git_files(root: Path, *which: str) -> list[PurePosixPath] | None:
    """Names that git lists below ``root``; None if git is missing or ``root`` is not in a work tree."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", *which, "--", "."],
            capture_output=True, check=True, env=environment,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return [PurePosixPath(os.fsdecode(name)) for name in listed.stdout.split(b"\0") if name]


def _walk(root: Path, start: Path, runs_dir: Path | None, exclude: Sequence[str]) -> Iterator[PurePosixPath]:
    count = 0
    for folder, folders, files in os.walk(start):
        here = Path(folder)
        within = PurePosixPath(here.relative_to(root).as_posix())
        kept = [name for name in sorted(folders) if _is_wanted_folder(here / name, runs_dir)]
        # os.walk does not enter links to folders: they are entries like files
        links = [name for name in kept if (here / name).is_symlink()]
        folders[:] = [name for name in kept if name not in links and not _matches_any(within / name, exclude)]
        for name in [*files, *links]:
            if name in _NO_CODE or Path(name).suffix in _NO_CODE_SUFFIXES or _matches_any(within / name, exclude):
                continue
            if _is_core_dump(here / name):
                continue
            count += 1
            if count > MAX_FILES:
                raise SpecError(
                    f"the code folder {root} contains more than {MAX_FILES} files, too many to copy for each run. "
                    "Move the spec file to a folder that contains only code, exclude files with code.exclude, "
                    "or set code.copy: false"
                )
            yield within / name


def _is_wanted_folder(path: Path, runs_dir: Path | None) -> bool:
    if path.name in _NEVER or path.name in _NO_CODE or _is_below(path, runs_dir):
        return False
    if path.name in _OUTPUT and not (path / "__init__.py").exists():
        return False
    # unwanted as well: a virtual environment of any name, and the directory of a run
    return not (path / "pyvenv.cfg").exists() and not (path / "node.pyz").exists()


def _is_no_code(root: Path, name: PurePosixPath) -> bool:
    """Whether an untracked file that git does not ignore is clearly not code."""
    if name.suffix in _NO_CODE_SUFFIXES or name.name in _NO_CODE or _is_core_dump(root / name):
        return True
    return any(not _is_wanted_folder(root / parent, None) for parent in list(name.parents)[:-1])


def _is_core_dump(path: Path) -> bool:
    """Whether the file is a core dump, such as ``core.1234``: an ELF file of type ET_CORE (elf(5), core(5))."""
    if path.name.partition(".")[0] not in ("core", "vgcore") or path.is_symlink() or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            head = file.read(18)
    except OSError:
        return False
    order: Literal["little", "big"] = "big" if head[5:6] == b"\x02" else "little"
    return head[:4] == b"\x7fELF" and int.from_bytes(head[16:18], order) == _ET_CORE


def _included(root: Path, patterns: Sequence[str]) -> Iterator[PurePosixPath]:
    for pattern in patterns:
        if pattern.startswith("/") or ".." in PurePosixPath(pattern).parts:
            raise SpecError(f"code.include {pattern!r} must be a path in the code folder {root}, such as 'data/*.txt'")
        for path in _glob(root, pattern):
            found = [path] if path.is_symlink() or not path.is_dir() else path.rglob("*")
            for file in found:
                if file.is_symlink() or file.is_file():
                    yield PurePosixPath(file.relative_to(root).as_posix())


def _glob(root: Path, pattern: str) -> list[Path]:
    try:
        return list(root.glob(pattern))
    except ValueError as error:
        raise SpecError(f"code.include {pattern!r} is not a valid pattern: {error}") from None


def _matches_any(name: PurePosixPath, patterns: Sequence[str]) -> bool:
    return any(_matches(name, pattern) for pattern in patterns)


def _matches(name: PurePosixPath, pattern: str) -> bool:
    """A pattern without a slash matches any component of the path; one with a slash matches the path or a parent.

    Unlike in .gitignore, ``*`` also matches slashes.
    """
    pattern = pattern.rstrip("/")
    if "/" not in pattern:
        return any(fnmatchcase(part, pattern) for part in name.parts)
    forms = [pattern.lstrip("/")]
    if pattern.startswith("**/"):
        forms.append(pattern[3:])
    candidates = [str(name), *(str(parent) for parent in name.parents)]
    return any(fnmatchcase(candidate, form) for candidate in candidates for form in forms)


def _size(path: Path) -> int | None:
    """The size of a file's copy in bytes; None if the file cannot be copied (deleted files, sockets, pipes)."""
    try:
        if path.is_symlink():
            return path.stat().st_size if path.is_file() else 0
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return 0 if path.is_symlink() else None


def _is_below(path: Path, folder: Path | None) -> bool:
    return folder is not None and path.is_relative_to(folder)


def _too_much(root: Path, sizes: dict[PurePosixPath, int], total: int) -> str:
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:5]
    names = "\n".join(f"  {size(sizes[name]):>9}  {name}" for name in largest)
    return (
        f"the code folder {root} contains {len(sizes)} files with {size(total)} in total, too much to copy for "
        f"each run (at most {size(MAX_BYTES)} and {MAX_FILES} files). The largest files:\n{names}\n"
        f"Exclude them with code.exclude: [{str(largest[0])!r}], or set code.copy: false"
    )
