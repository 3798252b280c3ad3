"""Where the program of a spec lies, what of its surroundings is copied, and how the ranks start it."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcaccel.errors import SpecError
from hpcaccel.submission.code_copy import CodePlan, plan_code
from hpcaccel.submission.images import IMAGES, Image, container_section
from hpcaccel.submission.loader_shield import FOLDER as LOADER_SHIELD
from hpcaccel.submission.rank_side import FOLDER

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec

__all__ = ["Entry", "check_secrets", "find_components", "find_entry", "launch_section", "plan_copy"]

PYTHON = "{python}"
"""Stands for the interpreter of the ranks, which may be known only on the node."""

_RUN_MODULE = (
    "import runpy, sys; sys.path[0] = {root!r}; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)
"""What ``python -m`` does, with the copy in front where that has the working directory: the code that one submits from
is often there, and may have changed by the time a job is requeued."""


@dataclass(frozen=True)
class Entry:
    """The program's own file and the folder of its code; None where it is installed rather than lying around."""

    file: Path | None
    root: Path | None


def find_entry(spec: JobSpec, *, base: Path, workdir: Path, function: Callable[..., Any] | None = None) -> Entry:
    """Args:
    base: the directory of the spec file.
    workdir: where the ranks will start.
    """
    entrypoint = spec.entrypoint
    if function is not None:
        return _function_entry(function)
    if entrypoint.script is not None:
        return _file_entry(Path(os.path.abspath(base / entrypoint.script)), base)
    if entrypoint.module is not None:
        return _module_entry(entrypoint.module, [base, workdir])
    word = (entrypoint.command or [""])[0]
    program = Path(os.path.abspath(base / word))
    if "/" in word and program.is_relative_to(base):
        return Entry(program, base)
    return Entry(None, None)


def _file_entry(file: Path, base: Path) -> Entry:
    return Entry(file, base if file.is_relative_to(base) else file.parent)


def _module_entry(module: str, places: list[Path]) -> Entry:
    relative = Path(*module.split("."))
    for place in places:
        for file in (place / relative.with_suffix(".py"), place / relative / "__main__.py"):
            if file.is_file():
                return Entry(file, place)
    return Entry(None, None)


def _function_entry(function: Callable[..., Any]) -> Entry:
    while isinstance(function, functools.partial):
        function = function.func
    module = inspect.getmodule(inspect.unwrap(function))
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return Entry(None, None)  # typed into a prompt or notebook: it travels inside of the pickle
    path = Path(file).absolute()
    if {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(sysconfig.get_path("stdlib")):
        return Entry(None, None)  # installed, on the nodes as well
    name = module.__spec__.name if module.__spec__ is not None else module.__name__
    depth = 0 if name == "__main__" else name.count(".") + (path.name == "__init__.py")
    return Entry(path, path.parents[depth])


def plan_copy(spec: JobSpec, entry: Entry, *, runs_dir: Path) -> CodePlan | None:
    """What to copy; None where nothing is. Raises SpecError when it is too much."""
    if not spec.code.copy_ or entry.root is None:
        return None
    return plan_code(
        entry.root, entrypoint=entry.file, include=spec.code.include, exclude=spec.code.exclude, runs_dir=runs_dir
    )


def launch_section(
    spec: JobSpec,
    *,
    entry: Entry,
    plan: CodePlan | None,
    code: Path,
    workdir: Path,
    backend: Literal["slurm", "local"],
    image: Image | None = None,
    images: Path = Path(IMAGES),
    after: Sequence[Mapping[str, str]] = (),
    beside: Mapping[str, Entry] | None = None,
    hears: bool = True,
) -> dict[str, Any]:
    """The ``launch`` part of ``spec.json``: what the batch step needs to start the ranks.

    Args:
        code: where the copy that ``plan`` describes will lie.
        after: the runs to wait for.
        beside: the programs of the spec's components.
        image: of the container, and ``images`` the folder that it is imported to.
        hears: whether the program notices through hpcaccel that it is to stop, as far as can be seen.
    """
    root = entry.root if plan is None else code
    stop = spec.stop_mode if hears else spec.runtime.stop or "signals"
    container = container_section(
        spec, image, code=code, roots=_roots(entry, plan), workdir=workdir, images=images, backend=backend
    )
    rank_side = [] if container is None else [str(code.parent / FOLDER)]
    return {
        "kind": "callable" if spec.entrypoint.kind == "function" else "program",
        "program": _program(spec, entry, plan, code),
        "python": python_of_ranks(spec),
        "pythonpath": [*([] if root is None else [str(root)]), *rank_side],
        "workdir": str(workdir),
        "backend": backend,
        "nodes": spec.slurm.min_nodes,
        "ranks_per_node": spec.ranks_per_node,
        "stop": stop,
        "stop_is_default": spec.runtime.stop is None,
        "loader_shield": str(code.parent / LOADER_SHIELD) if stop == "signals" else None,
        "srun": spec.srun.extra,
        "share_gpus": _share_gpus(spec),
        "setup_per_node": spec.environment.setup_per_node,
        "time_limit_seconds": spec.slurm.time_seconds,
        "warning_seconds": spec.warning_seconds,
        "launcher": spec.launcher,
        "container": container,
        "components": [
            _component(spec.of_component(name), name, own, plan, code) for name, own in (beside or {}).items()
        ],
        "after": [dict(one) for one in after],
        "stage": None if spec.stage is None else spec.stage.model_dump(mode="json"),
    }


def find_components(spec: JobSpec, *, base: Path, workdir: Path) -> dict[str, Entry]:
    """The programs of a spec's components, by their names; as :func:`find_entry`."""
    return {name: find_entry(spec.of_component(name), base=base, workdir=workdir) for name in spec.components}


def _component(spec: JobSpec, name: str, entry: Entry, plan: CodePlan | None, code: Path) -> dict[str, Any]:
    """Args:
    spec: of the component alone.
    """
    slurm = spec.slurm
    given = {"cpus-per-task": slurm.cpus_per_task, "gpus-per-task": slurm.gpus_per_task, "gpu-bind": slurm.gpu_bind}
    return {
        "name": name,
        "program": _program(spec, entry, plan, code),
        "nodes": slurm.min_nodes,
        "processes_per_node": slurm.ranks_per_node,
        "srun": [f"--{option}={value}" for option, value in given.items() if value is not None],
    }


def _roots(entry: Entry, plan: CodePlan | None) -> list[Path]:
    """Folders of code that the ranks run where it lies."""
    if plan is not None:
        return []
    return [folder for folder in (entry.root, entry.file and entry.file.parent) if folder is not None]


def _share_gpus(spec: JobSpec) -> bool:
    """Whether ranks see all GPUs of their node although each asked for its own; a binding of the user's own counts."""
    binds = spec.slurm.gpu_bind is not None or any(
        word.startswith(("--gpu-bind", "--tres-bind", "--gpus-per-task")) for word in spec.srun.extra
    )
    return spec.slurm.gpus_per_task is not None and not binds


def _program(spec: JobSpec, entry: Entry, plan: CodePlan | None, code: Path) -> list[str]:
    entrypoint = spec.entrypoint
    copied = plan.in_copy(entry.file, code) if plan is not None and entry.file is not None else None
    file = str(copied or entry.file)
    if entrypoint.kind == "function":
        return []
    if entrypoint.kind == "script":
        return [PYTHON, file, *spec.arguments()]
    if entrypoint.kind == "module":
        module = str(entrypoint.module)
        if copied is None:
            return [PYTHON, "-m", module, *spec.arguments()]
        return [PYTHON, "-c", _RUN_MODULE.format(root=str(code), module=module), *spec.arguments()]
    words = list(entrypoint.command or [])
    return [*([file] if entry.file is not None else words[:1]), *words[1:], *spec.arguments()]


def python_of_ranks(spec: JobSpec) -> str | None:
    """The ranks' Python; None leaves it to the node: the first on PATH after modules, conda and venv."""
    environment = spec.environment
    if environment.python is not None:
        return environment.python
    if spec.container is not None:
        return "python3"  # the image's
    if environment.conda is not None or environment.venv is not None:
        return None
    if (environment.modules or environment.setup) and importlib.util.find_spec("torch") is None:
        return None  # hpcaccel lives in an environment of its own; what trains is loaded by the job
    return sys.executable


def check_secrets(spec: JobSpec) -> None:
    """Raises SpecError for every secret that has no value here."""
    missing = [name for name in spec.environment.secrets if name not in os.environ]
    if missing:
        raise SpecError(
            [
                f"environment.secrets: {name} is not set where you submit. Export it first, or take it out of the list"
                for name in missing
            ]
        )
