"""Preparing a submission: load its specs, run all checks, assemble the files to write."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hpcaccel
from hpcaccel.core.launch_spec import LaunchSpec
from hpcaccel.core.progress_notes import show_progress
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import SpecError
from hpcaccel.render import render
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec import JobSpec, spec_hash
from hpcaccel.submission.calls import pickle_function
from hpcaccel.submission.clusters.checks import advice_or_refusal
from hpcaccel.submission.code.code_copy import CodePlan, sent_files
from hpcaccel.submission.code.provenance import GitState, git_state
from hpcaccel.submission.entrypoint.entry import (
    Entry,
    check_secrets,
    find_components,
    find_entry,
    launch_spec,
    plan_copy,
)
from hpcaccel.submission.entrypoint.images import IMAGES, Image, look_at_image
from hpcaccel.submission.entrypoint.script_lint import (
    advice,
    advice_on_cluster,
    advice_on_machine,
    notices_stops,
    refuse_expedite,
)
from hpcaccel.submission.entrypoint.webhook_secret import check_webhook
from hpcaccel.submission.jobs.backend import Backend, SlurmBackend, refuse_arrays_of
from hpcaccel.submission.runs.checkpoints import Origin
from hpcaccel.submission.submit.after_runs import After, resolve_after
from hpcaccel.submission.submit.request import LoadedRequest, Request, SpecSource, Target, load_request, new_run
from hpcaccel.submission.submit.sharing import SharedGroup, group_of

__all__ = ["PreparedSubmission", "Task", "prepare"]


@dataclass(frozen=True)
class Task:
    """One run: its spec, the launch part of its ``spec.json``, and its own overrides in an array."""

    spec: JobSpec
    launch: LaunchSpec
    overrides: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PreparedSubmission:
    """A submission that passed all checks; nothing has been written yet."""

    run: RunDir
    """The run directory, which does not exist yet."""
    name: str
    cluster: str
    backend: Backend
    script: str
    tasks: tuple[Task, ...]
    is_array: bool
    code: CodePlan | None
    function: bytes | None
    """The pickled call of a Python function; None for programs."""
    git: GitState | None
    created: float
    origin: Origin | None = None
    """The checkpoint from which the first attempt starts, if one was given at submission."""
    after: tuple[After, ...] = ()
    """The runs for which the job waits."""
    advice: tuple[str, ...] = ()
    """Warnings for the user before the job runs."""
    group: SharedGroup | None = None
    """The group that the run is shared with."""


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
) -> PreparedSubmission:
    """Run all checks of a submission without writing anything. Takes the arguments of :func:`hpcaccel.submit`, and:

    Args:
        facts: whether to also compare the job with the stored facts of the cluster.
        planned: runs that the same command submits before this one, by the names that ``after`` can use.
        workers: number of workers of a sweep. The script then starts workers, which run ``target`` in each trial.

    Raises:
        HpcaccelError: a check failed.
    """
    loaded = load_request(
        Request(target, tuple(args), dict(kwargs or {}), spec),
        cluster=cluster,
        runs_dir=runs_dir,
        overrides=[*overrides, *([] if name is None else [f"name={name}"])],
        grid=grid,
        from_run=from_run,
        after=after,
        slurm=slurm,
    )
    size = len(loaded.specs) if grid else workers
    checked = _check(loaded, array_size=size, is_sweep=workers is not None, facts=facts, planned=planned or {})
    return _assemble(loaded, checked, array_size=size, is_array=bool(grid))


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """The results of the checks of a submission."""

    run: RunDir
    workdir: Path
    """Working directory of the ranks."""
    entries: list[Entry]
    """The program of each task."""
    components: dict[str, Entry]
    """The programs of the spec's components, by name."""
    code: CodePlan | None
    images: list[Image | None]
    """The container image of each task."""
    after: list[After]
    group: SharedGroup | None
    site_advice: tuple[str, ...] | None
    """Warnings from the stored facts of the cluster; None if there are no facts."""


def _check(
    loaded: LoadedRequest,
    *,
    array_size: int | None,
    is_sweep: bool,
    facts: bool,
    planned: Mapping[str, RunDir],
) -> _Checked:
    """Check the specs. Most checks use only the first: the specs of an array share resources and environment."""
    spec, base = loaded.specs[0], loaded.request.base
    check_secrets(spec)
    check_webhook(spec)
    refuse_arrays_of(spec, is_array=array_size is not None)
    loaded.backend.check()
    folder = loaded.runs_dir
    site_advice = None
    if facts:
        site_advice = advice_or_refusal(
            spec, loaded.profile, array_tasks=array_size, runs_dir=folder, can_leave_aside=not is_sweep
        )
    run = new_run(folder, spec.name, SweepDir if is_sweep else RunDir)
    workdir = loaded.workdir
    entries = [find_entry(one, base=base, workdir=workdir, function=loaded.request.function) for one in loaded.specs]
    _require_one_folder(entries, loaded.assignments)
    components = find_components(spec, base=base, workdir=workdir)
    with_code = next((one for one in (entries[0], *components.values()) if one.root is not None), entries[0])
    code = plan_copy(spec, with_code, runs_dir=folder)
    if spec.workdir is None and code is not None and sent_files(code.root) is not None:
        workdir = run.code  # code from another machine is shared by runs: each starts in its own copy
    after = resolve_after(
        spec,
        backend=loaded.backend.name,
        cluster=loaded.cluster,
        runs_dir=folder,
        slurm=loaded.backend.slurm if isinstance(loaded.backend, SlurmBackend) else None,
        planned=planned,
    )
    return _Checked(
        run=run,
        workdir=workdir,
        entries=entries,
        components=components,
        code=code,
        images=[look_at_image(one, folder) for one in loaded.specs],
        after=after,
        group=group_of(spec, run),
        site_advice=site_advice,
    )


def _assemble(
    loaded: LoadedRequest, checked: _Checked, *, array_size: int | None, is_array: bool
) -> PreparedSubmission:
    """Render the script and the launch sections, pickle the function and collect the warnings."""
    request = loaded.request
    git = git_state(checked.entries[0].root or request.base, runs_dir=loaded.runs_dir)
    return PreparedSubmission(
        run=checked.run,
        name=loaded.specs[0].name,
        cluster=loaded.cluster,
        backend=loaded.backend,
        script=_script(loaded, checked, array_size=array_size, git=git),
        tasks=tuple(_tasks(loaded, checked)),
        is_array=is_array,
        code=checked.code,
        function=None if request.function is None else pickle_function(request.function, request.args, request.kwargs),
        git=git,
        created=time.time(),
        origin=loaded.origin,
        after=tuple(checked.after),
        advice=tuple(_advice(loaded, checked)),
        group=checked.group,
    )


def _tasks(loaded: LoadedRequest, checked: _Checked) -> Iterator[Task]:
    cooperative = {
        entry: notices_stops(spec, entry, checked.code)
        for entry, spec in dict(zip(checked.entries, loaded.specs, strict=True)).items()
    }
    each = zip(loaded.specs, checked.entries, loaded.assignments, checked.images, strict=True)
    for spec, entry, own, image in each:
        launch = launch_spec(
            spec,
            entry=entry,
            plan=checked.code,
            code=checked.run.code,
            workdir=checked.workdir,
            backend=loaded.backend.name,
            image=image,
            images=loaded.runs_dir / IMAGES,
            after=checked.after,
            beside=checked.components,
            cooperative=cooperative[entry],
        )
        yield Task(spec, launch, dict(text.split("=", 1) for text in own))


def _script(loaded: LoadedRequest, checked: _Checked, *, array_size: int | None, git: GitState | None) -> str:
    """The batch script, which the tasks of an array share.

    Raises:
        SpecError: a task needs a different script.
    """
    header = {
        "run": checked.run.run_id,
        "spec": spec_hash(loaded.specs[0])[:12],
        "commit": "none" if git is None else git.commit + (" with uncommitted changes" if git.dirty else ""),
        "hpcaccel": hpcaccel.__version__,
    }
    scripts = [
        render(
            spec,
            run_dir=checked.run,
            python=sys.executable,
            profile=loaded.profile,
            array_size=array_size,
            backend=loaded.backend.name,
            header=header,
            workdir=checked.workdir,
        )
        for spec in show_progress(loaded.specs, len(loaded.specs), "batch scripts compared")
    ]
    for own, script in zip(loaded.assignments, scripts, strict=True):
        if script != scripts[0]:
            raise SpecError(
                f"--grid: {' '.join(loaded.assignments[0])} and {' '.join(own)} need different batch scripts, but all "
                "tasks of an array share one. Use the same resources and environment, or submit these runs separately"
            )
    return scripts[0]


def _advice(loaded: LoadedRequest, checked: _Checked) -> Iterator[str]:
    """Warnings for the user before the job runs. Without stored facts the cluster itself is queried."""
    spec, backend, origin = loaded.specs[0], loaded.backend, loaded.origin
    if loaded.request.function is None:
        yield from advice(spec, checked.entries[0], checked.code)
    yield from checked.site_advice or ()
    if backend.name == "local":
        yield from advice_on_machine(spec)
    if checked.site_advice is None and isinstance(backend, SlurmBackend):
        refuse_expedite(spec, backend.slurm)
        yield from advice_on_cluster(spec, backend.slurm)
    if origin is not None and origin.may_vanish:
        yield origin.advice
    yield from dict.fromkeys(sentence for image in checked.images if image is not None for sentence in image.advice)


def _require_one_folder(entries: Sequence[Entry], assignments: Sequence[Sequence[str]]) -> None:
    """Raises SpecError if the tasks of an array have their code in different folders."""
    for entry, own in zip(entries, assignments, strict=True):
        if entry.root != entries[0].root:
            raise SpecError(
                f"--grid: the code of {' '.join(assignments[0])} is in {entries[0].root}, and that of {' '.join(own)} "
                f"is in {entry.root}, but all tasks of an array share one copy. Submit these runs separately"
            )
