"""A spec's program: its file, the code to copy, how the ranks start it, and its secrets."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcaccel.core.launch_spec import LaunchComponent, LaunchSpec, LaunchStage
from hpcaccel.errors import SpecError, UserError
from hpcaccel.submission.code.code_copy import CodePlan, plan_code
from hpcaccel.submission.code.package import LOADER_SHIELD, RANK_SIDE, TRAINER_BRIDGE
from hpcaccel.submission.entrypoint.images import IMAGES, Image, launch_container
from hpcaccel.submission.entrypoint.webhook_secret import without_webhook

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec

__all__ = [
    "Entry",
    "SecretSource",
    "bring_secrets",
    "check_secrets",
    "find_components",
    "find_entry",
    "launch_spec",
    "plan_copy",
    "secrets_from",
]

PYTHON = "{python}"
"""Placeholder for the ranks' interpreter, which may be known only on the node."""

_RUN_MODULE = (
    "import runpy, sys; sys.path[0] = {root!r}; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)
"""``python -m`` with the copy of the code first on ``sys.path`` instead of the working directory: the working directory
often contains the original code, which may have changed by the time a job is requeued."""


@dataclass(frozen=True)
class Entry:
    """The program's file and the folder of its code. Both are None for installed programs and notebook functions."""

    file: Path | None
    root: Path | None


def find_entry(spec: JobSpec, *, base: Path, workdir: Path, function: Callable[..., Any] | None = None) -> Entry:
    """Find a spec's program.

    Args:
        base: the directory of the spec file.
        workdir: working directory of the ranks.
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
        return Entry(None, None)  # defined in a prompt or notebook: the pickle contains it
    path = Path(file).absolute()
    if {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(sysconfig.get_path("stdlib")):
        return Entry(None, None)  # an installed module, which the nodes have too
    name = module.__spec__.name if module.__spec__ is not None else module.__name__
    depth = 0 if name == "__main__" else name.count(".") + (path.name == "__init__.py")
    return Entry(path, path.parents[depth])


def plan_copy(spec: JobSpec, entry: Entry, *, runs_dir: Path) -> CodePlan | None:
    """The code to copy; None if nothing is copied. Raises the errors of ``plan_code``."""
    if not spec.code.copy_ or entry.root is None:
        return None
    found = plan_code(
        entry.root, entrypoint=entry.file, include=spec.code.include, exclude=spec.code.exclude, runs_dir=runs_dir
    )
    return without_webhook(found, spec)


def launch_spec(
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
    cooperative: bool = True,
) -> LaunchSpec:
    """The ``launch`` part of ``spec.json``: what the batch step needs to start the ranks.

    Args:
        code: the directory of the copy that ``plan`` describes.
        after: the runs to wait for, each a mapping with the keys ``kind`` and ``run``.
        beside: the programs of the spec's components.
        image: the container's image; ``images`` is the folder that it is imported to.
        cooperative: whether the program detects stop requests through hpcaccel, according to its source.

    Raises:
        SpecError: the path of a folder that the container needs cannot be mounted.
    """
    root = entry.root if plan is None else code
    stop = spec.stop_mode if cooperative else spec.runtime.stop or "signals"
    container = launch_container(
        spec, image, code=code, roots=_roots(entry, plan), workdir=workdir, images=images, backend=backend
    )
    rank_side = [] if container is None else [str(code.parent / RANK_SIDE)]
    return LaunchSpec(
        kind="callable" if spec.entrypoint.kind == "function" else "program",
        program=_program(spec, entry, plan, code),
        python=python_of_ranks(spec),
        pythonpath=[*([] if root is None else [str(root)]), *rank_side],
        workdir=str(workdir),
        backend=backend,
        nodes=spec.slurm.min_nodes,
        node_sizes=spec.node_sizes,
        ranks_per_node=spec.ranks_per_node,
        stop=stop,
        stop_is_default=spec.runtime.stop is None,
        loader_shield=str(code.parent / LOADER_SHIELD) if stop == "signals" else None,
        bridge=None if spec.runtime.bridge is None else str(code.parent / TRAINER_BRIDGE),
        srun=spec.srun.extra,
        share_gpus=_share_gpus(spec),
        setup_per_node=spec.environment.setup_per_node,
        time_limit_seconds=spec.slurm.time_seconds,
        warning_seconds=spec.warning_seconds,
        launcher=spec.launcher,
        container=container,
        components=[_component(spec.of_component(name), name, own, plan, code) for name, own in (beside or {}).items()],
        after=[dict(one) for one in after],
        stage=None if spec.stage is None else LaunchStage(**spec.stage.model_dump(mode="json")),
        snapshots=spec.checkpoint.snapshot_every_steps is not None,
        watch=spec.launch_watch(str(workdir)),
        resume_args=spec.resume_arguments(),
    )


def find_components(spec: JobSpec, *, base: Path, workdir: Path) -> dict[str, Entry]:
    """The program of each component, by the component's name; see :func:`find_entry`."""
    return {name: find_entry(spec.of_component(name), base=base, workdir=workdir) for name in spec.components}


def _component(spec: JobSpec, name: str, entry: Entry, plan: CodePlan | None, code: Path) -> LaunchComponent:
    """The launch section of a component; ``spec`` is the component's own spec (``JobSpec.of_component``)."""
    slurm = spec.slurm
    given = {"cpus-per-task": slurm.cpus_per_task, "gpus-per-task": slurm.gpus_per_task, "gpu-bind": slurm.gpu_bind}
    return LaunchComponent(
        name=name,
        program=_program(spec, entry, plan, code),
        nodes=slurm.min_nodes,
        processes_per_node=slurm.ranks_per_node,
        srun=[f"--{option}={value}" for option, value in given.items() if value is not None],
    )


def _roots(entry: Entry, plan: CodePlan | None) -> list[Path]:
    """Folders of code that runs in place, without a copy."""
    if plan is not None:
        return []
    return [folder for folder in (entry.root, entry.file and entry.file.parent) if folder is not None]


def _share_gpus(spec: JobSpec) -> bool:
    """Whether ranks see all GPUs of their node although each requests its own; False if the user sets a binding."""
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
    """The ranks' Python. None stands for the first Python on the node's PATH after the spec's environment is set up."""
    environment = spec.environment
    if environment.python is not None:
        return environment.python
    if spec.container is not None:
        return "python3"  # the Python in the image
    if environment.conda is not None or environment.venv is not None:
        return None
    if (environment.modules or environment.setup) and importlib.util.find_spec("torch") is None:
        return None  # hpcaccel's own environment has no torch; the job's modules or setup provide it
    return sys.executable


# -- secrets ----------------------------------------------------------------------------------------------------------

SecretSource = Callable[[Sequence[str]], Mapping[str, str]]
"""A function that takes the names of missing secrets and returns their values by name; it may omit some."""

_SECRETS: ContextVar[SecretSource | None] = ContextVar("_SECRETS", default=None)


def check_secrets(spec: JobSpec) -> None:
    """Raises SpecError if secrets are missing in this process's environment; the message lists them."""
    missing = _missing(spec.environment.secrets)
    if missing:
        raise SpecError(
            [
                f"environment.secrets: {name} is not set in this environment. Export it, or remove it from the list"
                for name in missing
            ]
        )


@contextmanager
def secrets_from(source: SecretSource) -> Iterator[None]:
    """Context manager inside which :func:`bring_secrets` calls ``source`` for missing secrets."""
    token = _SECRETS.set(source)
    try:
        yield
    finally:
        _SECRETS.reset(token)


def bring_secrets(names: Sequence[str], *, run_id: str) -> None:
    """Add the secrets of the run ``run_id`` to this process's environment, which the job inherits.

    No secret is written to disk.

    Raises:
        UserError: a secret has no value.
    """
    source = _SECRETS.get()
    if source is not None and (missing := _missing(names)):
        os.environ.update(source(missing))
    if missing := _missing(names):
        raise UserError(
            f"environment.secrets of {run_id}: not set in this environment: {', '.join(missing)}. "
            "Export what is missing, then repeat the command"
        )


def _missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in os.environ]
