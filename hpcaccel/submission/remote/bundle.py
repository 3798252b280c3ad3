"""Bundles for a cluster behind SSH: a spec, loaded for that cluster, with everything that a submission there needs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import default_runs_dir
from hpcaccel.errors import SpecError
from hpcaccel.spec import ClusterProfile, JobSpec, SweepSpec, load_spec, load_sweep
from hpcaccel.spec.loading.expand import Elsewhere, escape, expanded_for
from hpcaccel.spec.loading.layers import MAX_FILE_BYTES, base_of, is_pipe, read_pipe
from hpcaccel.spec.loading.workflow import over_profile
from hpcaccel.submission.code.code_copy import CodePlan
from hpcaccel.submission.code.provenance import git_state
from hpcaccel.submission.entrypoint.entry import Entry, check_secrets, find_components, find_entry, plan_copy
from hpcaccel.submission.remote.remote_cluster import RemoteCluster, RemoteRequest

__all__ = ["SubmissionBundle", "expanded_on", "pack", "pack_spec"]


@dataclass(frozen=True, kw_only=True)
class SubmissionBundle:
    """A spec, resolved on this machine, with everything that the cluster needs to submit it."""

    kind: str
    """``job``, ``jobs`` or ``sweep``."""
    jobs: Sequence[JobSpec]
    """The specs of the file, with the cluster's defaults."""
    document: Mapping[str, Any]
    plan: CodePlan | None
    secrets: Mapping[str, str]
    commit: str
    """The git commit, with a trailing + if there are uncommitted changes; "" outside of git."""


def pack(
    cluster: RemoteCluster,
    file: str,
    overrides: Sequence[str],
    *,
    is_sweep: bool,
    several: Sequence[JobSpec] | None = None,
    to_submit: bool = True,
) -> SubmissionBundle:
    """Load and check a spec file with the cluster's defaults, and choose the code and secrets that are sent.

    Args:
        several: the jobs of a file with several jobs, from :func:`hpcaccel.spec.loading.workflow.read_jobs`.
        to_submit: if False, the cluster only checks the spec, and no code or secrets are sent.

    Raises:
        SpecError: the spec is invalid, a secret is not set on this machine, or the code cannot be sent; one line per
            problem.
    """
    if several is not None:
        jobs = [over_profile(job, cluster.profile) for job in several]
        return _packed(cluster, jobs, "jobs", base=base_of(file), to_submit=to_submit)
    load = load_sweep if is_sweep else load_spec
    spec = load(file, overrides=overrides, profile=cluster.profile)
    return pack_spec(cluster, spec, base=base_of(file), to_submit=to_submit)


def pack_spec(
    cluster: RemoteCluster, spec: JobSpec | SweepSpec, *, base: Path, to_submit: bool = True
) -> SubmissionBundle:
    """Bundle a spec that was loaded for the cluster, with its defaults. Errors are those of :func:`pack`.

    Args:
        base: the absolute directory to which the spec's relative paths refer.
    """
    if isinstance(spec, JobSpec):
        return _packed(cluster, [spec], "job", base=base, to_submit=to_submit)
    section = {"sweep": escape(spec.sweep.model_dump(mode="json", exclude_unset=True))}
    return _packed(cluster, [spec.job], "sweep", base=base, to_submit=to_submit, section=section)


def _packed(
    cluster: RemoteCluster,
    jobs: Sequence[JobSpec],
    kind: str,
    *,
    base: Path,
    to_submit: bool,
    section: Mapping[str, Any] | None = None,
) -> SubmissionBundle:
    entries = [find_entry(job, base=base, workdir=base) for job in jobs]
    beside = [find_components(job, base=base, workdir=base) for job in jobs]
    programs = [*entries, *(one for own in beside for one in own.values())]
    owners = [*jobs, *(job for job in jobs for _ in job.components)]
    plan = _one_plan(owners, programs) if to_submit else None
    documents = []
    for job, entry, own in zip(jobs, entries, beside, strict=True):
        if to_submit:
            check_secrets(job)
        document = _document_for_profile(job.model_dump(mode="json", exclude_unset=True), cluster.profile)
        _use_sent_path(document, job, entry)
        for name, program in own.items():
            _use_sent_path(document["components"][name], job.of_component(name), program)
        documents.append(document)
    names = dict.fromkeys(name for job in jobs for name in job.environment.secrets) if to_submit else {}
    git = git_state(next((entry.root for entry in entries if entry.root is not None), base)) if to_submit else None
    several = {"jobs": {one["name"]: one for one in documents}}
    return SubmissionBundle(
        kind=kind,
        jobs=jobs,
        document=several if kind == "jobs" else {**documents[0], **(section or {})},
        plan=plan,
        secrets={name: os.environ[name] for name in names},
        commit="" if git is None else git.commit + ("+" if git.dirty else ""),
    )


def _one_plan(jobs: Sequence[JobSpec], entries: Sequence[Entry]) -> CodePlan | None:
    """The plan of the code to send, which all jobs share."""
    plans = []
    for job, entry in zip(jobs, entries, strict=True):
        plan = plan_copy(job, entry, runs_dir=default_runs_dir())
        if plan is None and entry.file is not None:
            raise SpecError(
                f"code.copy is false, so {entry.file} on this machine is not sent to the cluster. Remove code.copy, or "
                "set entrypoint.command to a program on the cluster"
            )
        if plan is not None:
            plans.append(plan)
    if not plans:
        return None
    if len({plan.root for plan in plans}) > 1:
        folders = ", ".join(sorted({str(plan.root) for plan in plans}))
        raise SpecError(
            f"the programs of these jobs are in several directories ({folders}), but on a cluster behind SSH all jobs "
            "of a file share one copy of the code. Move the file to a directory that contains all programs, or submit "
            "the jobs one by one"
        )
    files = sorted({name for plan in plans for name in plan.files})
    return CodePlan(root=plans[0].root, files=tuple(files), total_bytes=max(plan.total_bytes for plan in plans))


def _document_for_profile(values: dict[str, Any], profile: ClusterProfile) -> dict[str, Any]:
    """The values of a spec as a document. ``${env:NAME}`` in the profile is kept for the cluster to expand."""

    def document(value: Any, default: Any) -> Any:
        if isinstance(value, Mapping):
            below = default if isinstance(default, Mapping) else {}
            return {key: document(one, below.get(key)) for key, one in value.items()}
        return value if value == default else escape(value)

    found = document(values, profile.defaults().values)
    assert isinstance(found, dict)
    return found


def _use_sent_path(document: dict[str, Any], job: JobSpec, entry: Entry) -> None:
    """Replace the program's path on this machine by its path in the sent code."""
    if entry.file is None or entry.root is None:
        return
    inside = "./" + entry.file.relative_to(entry.root).as_posix()
    if job.entrypoint.script is not None:
        document["entrypoint"]["script"] = inside
    elif job.entrypoint.command is not None:
        document["entrypoint"]["command"][0] = inside


_NAME = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)


@contextmanager
def expanded_on(cluster: RemoteCluster, source: Path | str) -> Iterator[None]:
    """Context manager that expands variables in specs to their values on ``cluster``, queried when needed.

    Args:
        source: the spec's file, or its text; all variables in it are queried together.
    """
    known: dict[str, str | None] = {}

    def variable(name: str) -> str | None:
        if name not in known:
            try:
                named = set(_NAME.findall(source if isinstance(source, str) else _text(source)))
            except OSError:
                named = set()  # loading the file as a spec reports the error
            request: dict[str, Any] = {"do": "environment", "names": sorted(named | {name})}
            known.update(cluster.again(lambda: cluster.converse(request, _values)))
        return known[name]

    with expanded_for(Elsewhere(cluster.name, variable)):
        yield


def _text(file: Path) -> str:
    data = read_pipe(file, MAX_FILE_BYTES) if is_pipe(file) else file.read_bytes()
    return data.decode("utf-8", "replace")


def _values(conversation: RemoteRequest) -> dict[str, str | None]:
    head, _ = conversation.expect("environment")
    return dict(head["values"])
