"""Everything that can be wrong with a submission is found here, before anything is made."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import hpcaccel
from hpcaccel.core.progress_notes import counted
from hpcaccel.core.run_dir import RunDir, SweepDir, default_runs_dir, new_run_id
from hpcaccel.errors import RunDirectoryError, SpecError, UserError
from hpcaccel.render import render
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec import (
    ClusterProfile,
    JobSpec,
    load_profile,
    profile_names,
    spec_from_values,
    spec_hash,
)
from hpcaccel.spec import grid as combinations
from hpcaccel.spec.expand import escape
from hpcaccel.spec.grid import grid_size
from hpcaccel.spec.load import load_variants
from hpcaccel.spec.pipes import base_of
from hpcaccel.submission.after_runs import After, resolve_after, with_after
from hpcaccel.submission.array_size import refuse_too_many
from hpcaccel.submission.backend import Backend, SlurmBackend, backend_named
from hpcaccel.submission.calls import ItemCall, pickle_function
from hpcaccel.submission.chain_jobs import refuse_arrays_of
from hpcaccel.submission.checkpoints import Origin, find_origin
from hpcaccel.submission.code_copy import CodePlan, sent_files
from hpcaccel.submission.entry import Entry, check_secrets, find_components, find_entry, launch_section, plan_copy
from hpcaccel.submission.images import IMAGES, look_at_image
from hpcaccel.submission.imports import hears_a_stop
from hpcaccel.submission.provenance import GitState, git_state
from hpcaccel.submission.script_lint import advice, advice_on_cluster, advice_on_machine, refuse_expedite
from hpcaccel.submission.site.checks import advice_or_refusal

__all__ = ["Prepared", "Task", "prepare"]

Target = str | os.PathLike[str] | JobSpec | Callable[..., Any]
SpecSource = str | os.PathLike[str] | JobSpec | Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """One run: its spec, the launch part of its ``spec.json``, and how it differs from its neighbours in an array."""

    spec: JobSpec
    launch: dict[str, Any]
    overrides: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A submission that is known to be sound; nothing has been written yet."""

    run: RunDir
    """Where it will lie."""
    name: str
    cluster: str
    backend: Backend
    script: str
    tasks: tuple[Task, ...]
    is_array: bool
    code: CodePlan | None
    function: bytes | None
    """The pickled call, of a Python function."""
    git: GitState | None
    created: float
    origin: Origin | None = None
    """The checkpoint that the first attempt starts from, where one was named at submission."""
    after: tuple[After, ...] = ()
    """The runs to wait for."""
    advice: tuple[str, ...] = ()
    """What the user should know of the script before it runs."""


@dataclass(frozen=True)
class _Request:
    """What submit was asked for, before it is looked at."""

    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: SpecSource | None

    @property
    def function(self) -> Callable[..., Any] | None:
        return self.target if callable(self.target) and not isinstance(self.target, JobSpec) else None

    @property
    def source(self) -> SpecSource:
        if self.function is None:
            if self.args or self.kwargs or self.spec is not None:
                raise UserError("arguments and spec= belong to a Python function; a spec file has entrypoint.args")
            assert not callable(self.target)
            return self.target
        if self.spec is None:
            raise UserError("a Python function needs a spec: hpcaccel.submit(function, …, spec='job.yaml')")
        return self.spec

    @property
    def base(self) -> Path:
        """The directory that relative paths of the spec start from."""
        source = self.source
        if isinstance(source, JobSpec):
            return Path.cwd() if source.source is None else source.source.parent
        if isinstance(source, Mapping):
            return Path.cwd()
        return base_of(source)


def prepare(
    target: Target,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    spec: SpecSource | None = None,
    cluster: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    grid: Sequence[str] | None = None,
    name: str | None = None,
    from_run: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    slurm: Slurm | None = None,
    facts: bool = True,
    after: Sequence[str] = (),
    planned: Mapping[str, RunDir] | None = None,
) -> Prepared:
    """Check a submission completely; the arguments are those of :func:`hpcaccel.submit`.

    Args:
        facts: hold it against the stored facts of the cluster, too.
        planned: runs that are submitted just before, by the names that ``after`` may use.
        workers: of a sweep, whose trials start as ``target`` does: the script is then that of an array of workers.

    Raises:
        SpecError, ClusterError, UserError: with what is wrong.
    """
    _require_a_current_directory()
    request = _Request(target, tuple(args), dict(kwargs or {}), spec)
    profile, backend_name = _cluster(cluster)
    _refuse_what_is_elsewhere(profile)
    changes = [*overrides, *([] if name is None else [f"name={name}"])]
    backend = backend_named(backend_name, slurm)
    if grid:
        refuse_too_many(grid_size(grid), backend, of_map=isinstance(target, ItemCall))
    chosen = combinations(grid) if grid else [[]]
    origin = None if from_run is None else find_origin(from_run)
    variants = [[*changes, *own] for own in chosen]
    loaded = counted(_load(request, variants, profile), len(chosen), "combinations are checked")
    specs = [with_after(_branched(one, origin), after) for one in loaded]
    _refuse_twins(specs, chosen)
    check_secrets(specs[0])
    refuse_arrays_of(specs[0], is_array=bool(grid) or workers is not None)
    backend.check()
    folder = _runs_dir(runs_dir, profile)
    tasks = len(specs) if grid else workers
    on_site = None
    if facts:
        on_site = advice_or_refusal(
            specs[0], profile, array_tasks=tasks, runs_dir=folder, can_leave_aside=workers is None
        )
    run = _new_run(folder, specs[0].name, RunDir if workers is None else SweepDir)
    base, workdir = request.base, _workdir(specs[0])
    entries = [find_entry(one, base=base, workdir=workdir, function=request.function) for one in specs]
    _refuse_folders_of_their_own(entries, chosen)
    beside = find_components(specs[0], base=base, workdir=workdir)
    with_code = next((one for one in (entries[0], *beside.values()) if one.root is not None), entries[0])
    code = plan_copy(specs[0], with_code, runs_dir=folder)
    if specs[0].workdir is None and code is not None and sent_files(code.root) is not None:
        workdir = run.code  # what was sent serves many runs: each starts in its own copy
    waiting = resolve_after(
        specs[0],
        backend=backend_name,
        cluster=profile.name if profile is not None else backend_name,
        runs_dir=folder,
        slurm=backend.slurm if isinstance(backend, SlurmBackend) else None,
        planned=planned or {},
    )
    images = [look_at_image(one, folder) for one in specs]
    hears = {entry: hears_a_stop(one, entry, code) for entry, one in dict(zip(entries, specs, strict=True)).items()}
    git = git_state(entries[0].root or base, runs_dir=folder)
    return Prepared(
        run=run,
        name=specs[0].name,
        cluster=profile.name if profile is not None else backend_name,
        backend=backend,
        script=_script(
            specs,
            chosen,
            run=run,
            profile=profile,
            backend=backend_name,
            array_size=len(specs) if grid else workers,
            git=git,
            workdir=workdir,
        ),
        tasks=tuple(
            Task(
                one,
                launch_section(
                    one,
                    entry=entry,
                    plan=code,
                    code=run.code,
                    workdir=workdir,
                    backend=backend_name,
                    image=image,
                    images=folder / IMAGES,
                    after=waiting,
                    beside=beside,
                    hears=hears[entry],
                ),
                dict(text.split("=", 1) for text in own),
            )
            for one, entry, own, image in zip(specs, entries, chosen, images, strict=True)
        ),
        is_array=bool(grid),
        code=code,
        function=None if request.function is None else pickle_function(request.function, request.args, request.kwargs),
        git=git,
        created=time.time(),
        origin=origin,
        after=tuple(waiting),
        advice=(
            *(() if request.function is not None else advice(specs[0], entries[0], code)),
            *(on_site or ()),
            *(advice_on_machine(specs[0]) if backend_name == "local" else ()),
            *(_advice_live(specs[0], backend) if on_site is None else ()),
            *_advice_on_origin(origin),
            *dict.fromkeys(sentence for image in images if image is not None for sentence in image.advice),
        ),
    )


def _advice_live(spec: JobSpec, backend: Backend) -> tuple[str, ...]:
    """Where no facts of the cluster are stored, the cluster itself is asked."""
    if not isinstance(backend, SlurmBackend):
        return ()
    refuse_expedite(spec, backend.slurm)
    return advice_on_cluster(spec, backend.slurm)


def _advice_on_origin(origin: Origin | None) -> list[str]:
    if origin is None or not origin.may_vanish:
        return []
    return [
        f"{origin.path} is in a run of somebody else's and cannot be pinned: that run may delete it before this one "
        "starts. Copy it to a place of your own, and begin from there"
    ]


def _require_a_current_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current directory does not exist any more: change into another one") from None


def _refuse_what_is_elsewhere(profile: ClusterProfile | None) -> None:
    if profile is not None and profile.host is not None:
        raise UserError(
            f"cluster {profile.name} is behind SSH (host: {profile.host}), and Python submits where Slurm is. From "
            f"here: hpcaccel submit FILE --cluster {profile.name}"
        )


def _cluster(name: str | None) -> tuple[ClusterProfile | None, Literal["slurm", "local"]]:
    """The profile, if any, and the backend: without one it is Slurm, and whether that is there is asked later."""
    if name == "slurm" and name not in profile_names():
        return None, "slurm"
    profile = load_profile(name)
    return profile, "slurm" if profile is None else profile.backend


def _load(request: _Request, variants: Sequence[Sequence[str]], profile: ClusterProfile | None) -> Iterator[JobSpec]:
    source, function = request.source, request.function
    name = None if function is None else f"{function.__module__}.{getattr(function, '__qualname__', 'call')}"
    if isinstance(source, JobSpec):
        # what it leaves open is filled in anew, so that the profile's defaults reach it
        source = escape(source.model_dump(mode="json", exclude_unset=True))
    if isinstance(source, Mapping):
        values = dict(source) if name is None else {**source, "entrypoint": {"function": name}}
        for overrides in variants:
            yield spec_from_values(values, base=request.base, overrides=overrides, profile=profile)
        return
    yield from load_variants(source, variants, profile=profile, function=name)


def _branched(spec: JobSpec, origin: Origin | None) -> JobSpec:
    """The spec with ``checkpoint.resume`` set to where it branches from.

    Raises:
        SpecError: it says something else already.
    """
    if origin is None:
        return spec
    if spec.checkpoint.resume not in ("auto", str(origin.path)):
        raise SpecError(
            f"checkpoint.resume is {spec.checkpoint.resume!r}, and --from says {origin.in_words}: both say what the "
            "first attempt starts from. Leave one of them out"
        )
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"resume": str(origin.path)})})


def _runs_dir(given: str | os.PathLike[str] | None, profile: ClusterProfile | None) -> Path:
    if given is not None:
        return Path(os.path.abspath(os.path.expanduser(given)))
    return default_runs_dir(profile.runs_dir if profile is not None else None)


def _new_run(folder: Path, name: str, kind: type[RunDir]) -> RunDir:
    if match := re.search("%[jtaA]", str(folder)):
        raise RunDirectoryError(
            f"the directory of runs {str(folder)!r} holds {match[0]}, which stands for a number of the job's in names "
            "that submitit makes. Choose another place with --runs-dir or HPCACCEL_RUNS_DIR"
        )
    while True:
        run = kind(folder / name / new_run_id())
        if not os.path.lexists(run.path):
            return run


def _workdir(spec: JobSpec) -> Path:
    workdir = Path(spec.workdir or os.getcwd())
    if not workdir.is_dir():
        raise SpecError(f"workdir {str(workdir)!r} is not a directory")
    return workdir


def _script(
    specs: Sequence[JobSpec],
    chosen: Sequence[Sequence[str]],
    *,
    run: RunDir,
    profile: ClusterProfile | None,
    backend: Literal["slurm", "local"],
    array_size: int | None,
    git: GitState | None,
    workdir: Path,
) -> str:
    """The batch script, which the tasks of an array share."""
    header = {
        "run": run.run_id,
        "spec": spec_hash(specs[0])[:12],
        "commit": "none" if git is None else git.commit + (" and changes" if git.dirty else ""),
        "hpcaccel": hpcaccel.__version__,
    }
    scripts = [
        render(
            spec,
            run_dir=run,
            python=sys.executable,
            profile=profile,
            array_size=array_size,
            backend=backend,
            header=header,
            workdir=workdir,
        )
        for spec in counted(specs, len(specs), "batch scripts are compared")
    ]
    for own, script in zip(chosen, scripts, strict=True):
        if script != scripts[0]:
            raise SpecError(
                f"--grid: {' '.join(own)} needs another batch script than {' '.join(chosen[0])}, and all tasks of an "
                "array share one. Resources and environment cannot differ between tasks: submit such runs one by one"
            )
    return scripts[0]


def _refuse_twins(specs: Sequence[JobSpec], chosen: Sequence[Sequence[str]]) -> None:
    seen: dict[str, Sequence[str]] = {}
    for spec, own in zip(specs, chosen, strict=True):
        twin = seen.setdefault(spec_hash(spec), own)
        if twin is not own:
            raise SpecError(f"--grid: {' '.join(twin)} and {' '.join(own)} ask for the same run")


def _refuse_folders_of_their_own(entries: Sequence[Entry], chosen: Sequence[Sequence[str]]) -> None:
    for entry, own in zip(entries, chosen, strict=True):
        if entry.root != entries[0].root:
            raise SpecError(
                f"--grid: {' '.join(own)} has its code in {entry.root}, {' '.join(chosen[0])} in {entries[0].root}, "
                "and the tasks of an array share one copy. Submit them one by one"
            )
