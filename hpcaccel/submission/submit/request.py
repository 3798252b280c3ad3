"""The request of a submission: the target and options of the ``submit`` call, and the specs loaded from them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcaccel.core.progress_notes import show_progress
from hpcaccel.core.run_dir import RunDir, default_runs_dir, new_run_id
from hpcaccel.errors import RunDirectoryError, SpecError, UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec import ClusterProfile, JobSpec, load_profile, profile_names, spec_from_values, spec_hash
from hpcaccel.spec import grid as combinations
from hpcaccel.spec.loading.expand import escape
from hpcaccel.spec.loading.layers import base_of
from hpcaccel.spec.loading.load import load_variants
from hpcaccel.spec.loading.overrides import grid_size
from hpcaccel.submission.calls import ItemCall
from hpcaccel.submission.jobs.backend import Backend, backend_named, refuse_too_many
from hpcaccel.submission.runs.checkpoints import Origin, find_origin
from hpcaccel.submission.submit.after_runs import with_after

__all__ = ["LoadedRequest", "Request", "SpecSource", "Target", "load_request", "new_run"]

Target = str | os.PathLike[str] | JobSpec | Callable[..., Any]
SpecSource = str | os.PathLike[str] | JobSpec | Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """The target of a submission: a spec, or a Python function with its arguments and the spec of its resources."""

    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: SpecSource | None

    @property
    def function(self) -> Callable[..., Any] | None:
        return self.target if callable(self.target) and not isinstance(self.target, JobSpec) else None

    @property
    def source(self) -> SpecSource:
        """The source of the spec.

        Raises:
            UserError: there is a function without a spec, or there are arguments without a function.
        """
        if self.function is None:
            if self.args or self.kwargs or self.spec is not None:
                raise UserError("arguments and spec= are only for Python functions. For a spec, set entrypoint.args")
            assert not callable(self.target)
            return self.target
        if self.spec is None:
            raise UserError("a Python function needs a spec: hpcaccel.submit(function, …, spec='job.yaml')")
        return self.spec

    @property
    def base(self) -> Path:
        """The directory against which relative paths of the spec are resolved."""
        source = self.source
        if isinstance(source, JobSpec):
            return Path.cwd() if source.source is None else source.source.parent
        if isinstance(source, Mapping):
            return Path.cwd()
        return base_of(source)


@dataclass(frozen=True, kw_only=True)
class LoadedRequest:
    """The specs of a request, one per task, and where to submit them."""

    request: Request
    profile: ClusterProfile | None
    backend: Backend
    runs_dir: Path
    specs: list[JobSpec]
    assignments: list[list[str]]
    """For each task, its ``key=value`` settings from --grid. Without --grid, one empty list."""
    origin: Origin | None
    """The checkpoint from which the first attempt starts, if one was given."""

    @property
    def cluster(self) -> str:
        return self.backend.name if self.profile is None else self.profile.name

    @property
    def workdir(self) -> Path:
        """The working directory of the ranks; raises SpecError if it does not exist."""
        workdir = Path(self.specs[0].workdir or os.getcwd())
        if not workdir.is_dir():
            raise SpecError(
                f"workdir {str(workdir)!r} is not a directory on this machine: create it, or set workdir to an "
                "existing directory"
            )
        return workdir


def load_request(
    request: Request,
    *,
    cluster: str | None,
    runs_dir: str | os.PathLike[str] | None,
    overrides: Sequence[str],
    grid: Sequence[str] | None,
    from_run: str | os.PathLike[str] | None,
    after: Sequence[str],
    slurm: Slurm | None,
) -> LoadedRequest:
    """Load one spec for each combination of ``grid``; a spec file is read once. Takes the arguments of ``submit``.

    Raises:
        SpecError, CheckpointError, RunNotFound, UserError: the spec, ``from_run`` or another argument is invalid.
    """
    _require_current_directory()
    profile, backend_name = _profile(cluster)
    backend = backend_named(backend_name, slurm)
    if grid:
        refuse_too_many(grid_size(grid), backend, of_map=isinstance(request.target, ItemCall))
    assignments = [list(one) for one in combinations(grid)] if grid else [[]]
    origin = None if from_run is None else find_origin(from_run)
    variants = [[*overrides, *own] for own in assignments]
    loaded = show_progress(_load(request, variants, profile), len(variants), "combinations checked")
    specs = [with_after(_branched(one, origin), after) for one in loaded]
    _refuse_twins(specs, assignments)
    return LoadedRequest(
        request=request,
        profile=profile,
        backend=backend,
        runs_dir=_runs_dir(runs_dir, profile),
        specs=specs,
        assignments=assignments,
        origin=origin,
    )


def _require_current_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current directory no longer exists: change to another directory") from None


def _profile(name: str | None) -> tuple[ClusterProfile | None, Literal["slurm", "local"]]:
    """The profile, if any, and the backend. Without a profile the backend is Slurm; ``Backend.check`` raises an error
    later if this machine has no Slurm."""
    if name == "slurm" and name not in profile_names():
        return None, "slurm"
    profile = load_profile(name)
    if profile is not None and profile.host is not None:
        raise UserError(
            f"cluster {profile.name!r} is behind SSH (host: {profile.host}), and the Python API can only submit on a "
            f"machine with Slurm. From this machine, run: hpcaccel submit FILE --cluster {profile.name}"
        )
    return profile, "slurm" if profile is None else profile.backend


def _load(request: Request, variants: Sequence[Sequence[str]], profile: ClusterProfile | None) -> Iterator[JobSpec]:
    source, function = request.source, request.function
    name = None if function is None else f"{function.__module__}.{getattr(function, '__qualname__', 'call')}"
    if isinstance(source, JobSpec):
        # Pass on only values that were set explicitly. Defaults are applied again, so that the profile's take effect.
        source = escape(source.model_dump(mode="json", exclude_unset=True))
    if isinstance(source, Mapping):
        values = dict(source) if name is None else {**source, "entrypoint": {"function": name}}
        for overrides in variants:
            yield spec_from_values(values, base=request.base, overrides=overrides, profile=profile)
        return
    yield from load_variants(source, variants, profile=profile, function=name)


def _branched(spec: JobSpec, origin: Origin | None) -> JobSpec:
    """The spec with ``checkpoint.resume`` set to ``origin``.

    Raises:
        SpecError: the spec sets another value.
    """
    if origin is None:
        return spec
    if spec.checkpoint.resume not in ("auto", str(origin.path)):
        raise SpecError(
            f"checkpoint.resume is {spec.checkpoint.resume!r}, and --from is {origin.label}: both set the "
            "checkpoint that the first attempt starts from. Remove one of them"
        )
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"resume": str(origin.path)})})


def _refuse_twins(specs: Sequence[JobSpec], assignments: Sequence[Sequence[str]]) -> None:
    """Raises SpecError if two combinations of a grid give the same spec."""
    seen: dict[str, Sequence[str]] = {}
    for spec, own in zip(specs, assignments, strict=True):
        twin = seen.setdefault(spec_hash(spec), own)
        if twin is not own:
            raise SpecError(f"--grid: {' '.join(twin)} and {' '.join(own)} result in the same run: remove one of them")


def _runs_dir(given: str | os.PathLike[str] | None, profile: ClusterProfile | None) -> Path:
    if given is not None:
        return Path(os.path.abspath(os.path.expanduser(given)))
    return default_runs_dir(profile.runs_dir if profile is not None else None)


def new_run(folder: Path, name: str, kind: type[RunDir]) -> RunDir:
    """A run directory with a new id; raises RunDirectoryError if submitit cannot use ``folder``."""
    if match := re.search("%[jtaA]", str(folder)):
        raise RunDirectoryError(
            f"the path of the runs directory, {str(folder)!r}, contains {match[0]}, which submitit replaces with a "
            "job or task ID. Choose another directory with --runs-dir or HPCACCEL_RUNS_DIR"
        )
    while True:
        run = kind(folder / name / new_run_id())
        if not os.path.lexists(run.path):
            return run
