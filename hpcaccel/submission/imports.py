"""What a script uses of hpcaccel, in its own file and in those that it imports from its folder. Nothing is executed.

Modules that are installed elsewhere are not read: a script that uses hpcaccel only through them seems not to use it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpcaccel.submission.code_copy import CodePlan
from hpcaccel.submission.entry import Entry

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec

__all__ = ["HEARS_A_STOP", "Used", "hears_a_stop", "used_by"]

HEARS_A_STOP = ("Accelerator", "should_stop")
"""Names of ours through which a program notices that it is to stop; ``hpcaccel.log`` is none."""

_BY_NAME = {"import_module", "__import__", "run_module"}
"""Functions that import what a text names."""


@dataclass
class Used:
    """What the files of a program use."""

    ours: set[str] = field(default_factory=set)
    """Names of hpcaccel, as ``Accelerator``."""
    attributes: set[str] = field(default_factory=set)
    """Every attribute and imported name, of whatever."""

    modules: set[str] = field(default_factory=set)
    """The packages that are imported, as ``torch``."""

    @property
    def hears_a_stop(self) -> bool:
        return not self.ours.isdisjoint(HEARS_A_STOP)


def hears_a_stop(spec: JobSpec, entry: Entry, plan: CodePlan | None) -> bool:
    """Whether a program notices through hpcaccel that it is to stop. What cannot be looked into is taken to do so: a
    function, which may hold anything, and a module that is installed somewhere."""
    if spec.entrypoint.kind in ("function", "command") or entry.file is None:
        return True
    return used_by(entry, plan).hears_a_stop


def used_by(entry: Entry, plan: CodePlan | None) -> Used:
    """What the program of ``entry`` uses: its file, and whatever that imports from the folder of its code, and so on.

    Args:
        plan: what is copied; None: the code runs where it lies.
    """
    used = Used()
    if entry.file is None:
        return used
    folder = _Folder(entry, plan)
    waiting, seen = [entry.file], {entry.file}
    while waiting:
        file = waiting.pop()
        tree = _parse(file)
        if tree is None:
            continue
        _collect(tree, used)
        for other in folder.imports(tree, file):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return used


def _parse(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None  # the ranks will say it better


class _Folder:
    """The code of a program, as its imports find it."""

    def __init__(self, entry: Entry, plan: CodePlan | None) -> None:
        assert entry.file is not None
        root = entry.file.parent if entry.root is None else entry.root
        self._root = root
        self._copied = None if plan is None else {plan.root / name for name in plan.files}
        # Python's own order: the script's folder, then PYTHONPATH. `src` is where packages lie that are installed from
        # the folder (`pip install -e .`).
        self._places = list(dict.fromkeys([entry.file.parent, root, root / "src"]))

    def imports(self, tree: ast.Module, file: Path) -> Iterator[Path]:
        """The files of the folder that ``file`` imports."""
        for node in ast.walk(tree):
            for places, module, names in _imported(node, file, self._places):
                yield from self._found(places, module, names)

    def _found(self, places: list[Path], module: list[str], names: list[str]) -> Iterator[Path]:
        for place in places:
            package = place
            for part in module:
                yield from self._ours(package / part / "__init__.py", package / f"{part}.py")
                package = package / part
            yield from self._ours(package / "__init__.py" if module or names else package)
            for name in names:
                yield from self._ours(package / name / "__init__.py", package / f"{name}.py")

    def _ours(self, *files: Path) -> Iterator[Path]:
        for file in files:
            known = file.is_relative_to(self._root) if self._copied is None else file in self._copied
            if known and file.is_file():
                yield file


def _imported(node: ast.AST, file: Path, places: list[Path]) -> Iterator[tuple[list[Path], list[str], list[str]]]:
    """Where to look, the module, and names that may be modules inside of it."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield places, alias.name.split("."), []
    elif isinstance(node, ast.ImportFrom):
        module = node.module.split(".") if node.module else []
        above = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else []
        yield (above if node.level else places), module, [alias.name for alias in node.names if alias.name != "*"]
    elif isinstance(node, ast.Call) and _name(node.func) in _BY_NAME and node.args:
        named = node.args[0]
        if isinstance(named, ast.Constant) and isinstance(named.value, str):
            yield places, named.value.lstrip(".").split("."), []


def _collect(tree: ast.Module, used: Used) -> None:
    called = {"hpcaccel"}  # under which names this file knows the package and its modules
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used.modules.update(alias.name.partition(".")[0] for alias in node.names)
            called.update(alias.asname or "hpcaccel" for alias in node.names if _is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            used.attributes |= names
            used.modules |= set() if node.level else {(node.module or "").partition(".")[0]}
            if _is_ours(node.module or "") and not node.level:
                used.ours |= set(HEARS_A_STOP) if "*" in names else names
                called.update(alias.asname or alias.name for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.attributes.add(node.attr)
            if _first_name(node) in called:
                used.ours.add(node.attr)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "hpcaccel"


def _first_name(node: ast.expr) -> str | None:
    """``a`` of ``a.b.c``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _name(node: ast.expr) -> str | None:
    """The last name of ``importlib.import_module``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
