"""Warnings about a script that ignores stop requests or does not resume, and about a job that cannot be requeued.

The script and the files that it imports from its code folder are parsed, not executed. Installed modules are not
parsed: a script that uses hpcaccel only through installed modules counts as not using it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpcaccel.errors import HpcaccelError, SpecError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.site_parsing import why_not_expedited
from hpcaccel.spec import JobSpec
from hpcaccel.submission.code.code_copy import CodePlan
from hpcaccel.submission.entrypoint.entry import Entry, python_of_ranks

__all__ = [
    "STOP_NAMES",
    "ImportedModules",
    "advice",
    "advice_on_cluster",
    "advice_on_job",
    "advice_on_machine",
    "notices_stops",
    "refuse_expedite",
    "used_by",
]


STOP_NAMES = ("Accelerator", "HpcaccelCallback", "ResultsFile", "should_stop", "stop_gate")
"""hpcaccel names through which a program detects a stop request; ``hpcaccel.log`` is not one."""

_BY_NAME = {"import_module", "__import__", "run_module"}
"""Functions that import a module by name."""


@dataclass
class ImportedModules:
    """The names and modules that a program uses."""

    ours: set[str] = field(default_factory=set)
    """hpcaccel names, such as ``Accelerator``."""
    attributes: set[str] = field(default_factory=set)
    """Attributes of any object, and names imported from any module."""

    modules: set[str] = field(default_factory=set)
    """Imported packages, such as ``torch``."""

    @property
    def notices_stops(self) -> bool:
        return not self.ours.isdisjoint(STOP_NAMES)


def notices_stops(spec: JobSpec, entry: Entry, plan: CodePlan | None) -> bool:
    """Whether a program detects stop requests through hpcaccel.

    True if the program cannot be checked: functions, commands and installed modules are not parsed.
    """
    if spec.entrypoint.kind in ("function", "command") or entry.file is None or spec.runtime.bridge is not None:
        return True
    return used_by(entry, plan).notices_stops


def used_by(entry: Entry, plan: CodePlan | None) -> ImportedModules:
    """The names used by the program of ``entry``: by its file and, recursively, by its imports from the code folder.

    Args:
        plan: the files that are copied; None if the code runs in place.
    """
    used = ImportedModules()
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
        return None  # unreadable or not valid Python: the ranks report the error


class _Folder:
    """A program's code folder, for resolving the program's imports."""

    def __init__(self, entry: Entry, plan: CodePlan | None) -> None:
        assert entry.file is not None
        root = entry.file.parent if entry.root is None else entry.root
        self._root = root
        self._copied = None if plan is None else {plan.root / name for name in plan.files}
        # In the order of sys.path: the script's folder, then PYTHONPATH. `src` may have packages that are
        # installed from this folder (`pip install -e .`).
        self._places = list(dict.fromkeys([entry.file.parent, root, root / "src"]))

    def imports(self, tree: ast.Module, file: Path) -> Iterator[Path]:
        """The files in this code folder that ``file`` imports."""
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
    """Yield, for each import, its search path, the parts of the module's name, and names that may be submodules."""
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


def _collect(tree: ast.Module, used: ImportedModules) -> None:
    called = {"hpcaccel"}  # the names that this file binds to the package and its modules
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used.modules.update(alias.name.partition(".")[0] for alias in node.names)
            called.update(alias.asname or "hpcaccel" for alias in node.names if _is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            used.attributes |= names
            used.modules |= set() if node.level else {(node.module or "").partition(".")[0]}
            if _is_ours(node.module or "") and not node.level:
                used.ours |= set(STOP_NAMES) if "*" in names else names
                called.update(alias.asname or alias.name for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.attributes.add(node.attr)
            if _first_name(node) in called:
                used.ours.add(node.attr)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "hpcaccel"


def _first_name(node: ast.expr) -> str | None:
    """The first name of a dotted expression: ``a`` of ``a.b.c``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _name(node: ast.expr) -> str | None:
    """The last name of a dotted expression: ``import_module`` of ``importlib.import_module``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


MANY_RANKS_PER_CORE = 16
_LOADS = {"resume", "epochs", "steps", "load_state"}
"""Methods that load a checkpoint."""


def advice(spec: JobSpec, entry: Entry, plan: CodePlan | None) -> tuple[str, ...]:
    """Warnings about a script that does not detect stop requests, loads no checkpoint, or would not find torch.

    Only the script and its imports from the code folder are checked; a name counts wherever it occurs in them.
    """
    if spec.entrypoint.kind == "command" or entry.file is None:
        return ()
    used, shown = used_by(entry, plan), entry.file.name
    return (*_on_stopping(spec, used, shown), *_on_torch(spec, used, shown))


def _on_torch(spec: JobSpec, used: ImportedModules, shown: str) -> tuple[str, ...]:
    """A warning if the script needs torch but the ranks would start with hpcaccel's Python, which lacks torch."""
    wants_it = "torch" in used.modules or "Accelerator" in used.ours
    if not wants_it or python_of_ranks(spec) != sys.executable or importlib.util.find_spec("torch") is not None:
        return ()
    return (
        f"{shown} needs torch, but the ranks would use hpcaccel's own Python ({sys.executable}), which does not have "
        "it. Use an environment with torch (environment.venv, conda, modules or python), or a container",
    )


def _on_stopping(spec: JobSpec, used: ImportedModules, shown: str) -> tuple[str, ...]:
    if not used.notices_stops:
        if spec.runtime.stop is None:
            return (
                f"neither {shown} nor the files it imports from its folder use hpcaccel.Accelerator or stop_gate: to "
                "stop the ranks, hpcaccel sends SIGTERM, as Slurm does (runtime.stop: signals)",
            )
        if spec.runtime.stop == "signals":
            return ()
        return (
            f"neither {shown} nor the files it imports from its folder use hpcaccel.Accelerator or stop_gate, so the "
            "program does not save and exit on a stop request (runtime.stop: cooperative). Set runtime.stop to signals "
            "to stop the ranks with SIGTERM, as Slurm does",
        )
    if "Accelerator" in used.ours and not used.attributes & _LOADS:
        return (
            f"{shown} never loads a checkpoint: after a preemption it would restart from step 0. Loop over "
            "accelerator.epochs() or steps(), or call accelerator.resume() after prepare()",
        )
    return ()


def advice_on_cluster(spec: JobSpec, slurm: Slurm) -> tuple[str, ...]:
    """A warning if the job is to be requeued but one of its partitions preempts by cancelling.

    ``JobRequeue=0`` alone is no obstacle: it is a default, which --requeue in the batch script overrides
    (slurm.conf(5)).
    """
    if spec.resilience.chain is not None or not spec.resilience.requeue:
        return ()
    try:
        partitions = {one.name: one for one in slurm.partitions()}
    except HpcaccelError:
        return ()  # only advice: the submission reports cluster errors with a better message
    default = next((name for name, one in partitions.items() if one.default), "")
    wanted = (spec.slurm.partition or default).split(",")
    cancelling = [name for name in wanted if name in partitions and partitions[name].preempt_mode.upper() == "CANCEL"]
    if not cancelling:
        return ()
    names = ", ".join(map(repr, cancelling))
    which = f"partition {names} preempts" if len(cancelling) == 1 else f"partitions {names} preempt"
    return (
        f"{which} by cancelling (PreemptMode=CANCEL), and a job that is preempted without grace time is not requeued: "
        "set resilience.chain to the maximum number of consecutive jobs",
    )


def refuse_expedite(spec: JobSpec, slurm: Slurm) -> None:
    """Raises SpecError if the spec requests an expedited requeue and the cluster does not support it."""
    if spec.resilience.requeue != "expedite":
        return
    try:
        why = why_not_expedited(slurm.config())
    except HpcaccelError:
        return  # the submission reports cluster errors with a better message
    if why:
        raise SpecError([f"resilience.requeue 'expedite' is not supported on this cluster: {why}. Set it to true"])


def advice_on_machine(spec: JobSpec) -> tuple[str, ...]:
    """For the local backend: a warning if the job starts too many ranks for this machine's cores."""
    ranks, cores = spec.slurm.min_nodes * spec.ranks_per_node, os.cpu_count() or 1
    if ranks <= MANY_RANKS_PER_CORE * cores:
        return ()
    return (
        f"{ranks:,} ranks, each a separate process, would start on this machine, which has {cores} "
        f"core{'s' if cores > 1 else ''}. For fewer ranks, set slurm.ntasks_per_node",
    )


def advice_on_job(spec: JobSpec, slurm: Slurm, job_id: str) -> tuple[str, ...]:
    """A warning if the cluster (such as a site's plugin) has removed --requeue from a job that was just submitted."""
    if spec.resilience.chain is not None or not spec.resilience.requeue:
        return ()
    try:
        job = slurm.job(job_id)
    except HpcaccelError:
        return ()
    if job is None or job.requeue:
        return ()
    return (
        f"the cluster removed --requeue from job {job_id}: it will not be requeued after a preemption or at its time "
        "limit. Set resilience.chain to the maximum number of consecutive jobs",
    )
