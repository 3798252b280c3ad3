"""This side: what a submission takes along, and handing it in."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from hpcaccel.core.run_dir import default_runs_dir
from hpcaccel.errors import SpecError
from hpcaccel.spec import ClusterProfile, JobSpec, load_spec, load_sweep
from hpcaccel.spec.expand import escape
from hpcaccel.spec.pipes import base_of
from hpcaccel.spec.site import facts_path
from hpcaccel.spec.workflow import over_profile
from hpcaccel.submission.code_copy import CodePlan
from hpcaccel.submission.entry import Entry, check_secrets, find_components, find_entry, plan_copy
from hpcaccel.submission.provenance import git_state, submitted_from
from hpcaccel.submission.remote import code, remote_index
from hpcaccel.submission.remote.remote_cluster import Conversation, RemoteCluster

__all__ = ["Handed", "Luggage", "asked", "hand_over", "pack", "sent_facts"]


@dataclass(frozen=True, kw_only=True)
class Luggage:
    """A spec with all that was said about it here, ready to be read on the cluster."""

    kind: str
    """``job``, ``jobs`` or ``sweep``."""
    jobs: Sequence[JobSpec]
    """The specs in it, with the cluster's defaults."""
    document: Mapping[str, Any]
    plan: CodePlan | None
    secrets: Mapping[str, str]
    commit: str
    """With + behind it where there are changes; empty outside of git."""


@dataclass(frozen=True, kw_only=True)
class Handed:
    code: int
    out: bytes
    err: bytes
    run: Mapping[str, str] | None
    """``run_id``, ``name``, ``job_id``, ``path``; None where nothing was submitted, or several were. Where
    it is ``open`` the job id may be empty."""
    repeated: bool
    """It was asked for earlier, and the answer did not arrive then."""
    runs: Sequence[Mapping[str, str]] = ()
    """All that were submitted: of a file with several jobs, each."""
    open: bool = False
    """Whether Slurm has taken the job is not known, or it has not taken all: the same, given again, goes on."""


def pack(
    cluster: RemoteCluster,
    file: str,
    overrides: Sequence[str],
    *,
    is_sweep: bool,
    several: Sequence[JobSpec] | None = None,
    to_submit: bool = True,
) -> Luggage:
    """Load a spec file with the cluster's defaults and choose what goes along; mistakes are found here.

    Args:
        several: the jobs of a file that holds several, as :func:`hpcaccel.spec.workflow.read_jobs` gives them.
        to_submit: False: it is only going to be looked at there, so that no code goes along, and no secret.

    Raises:
        SpecError: with a line for each thing that is wrong; also secrets that are not set here.
    """
    base = base_of(file)
    more: dict[str, Any] = {}
    if several is not None:
        jobs = [over_profile(job, cluster.profile) for job in several]
    elif is_sweep:
        sweep = load_sweep(file, overrides=overrides, profile=cluster.profile)
        jobs, more = [sweep.job], {"sweep": escape(sweep.sweep.model_dump(mode="json", exclude_unset=True))}
    else:
        jobs = [load_spec(file, overrides=overrides, profile=cluster.profile)]
    entries = [find_entry(job, base=base, workdir=base) for job in jobs]
    beside = [find_components(job, base=base, workdir=base) for job in jobs]
    programs = [*entries, *(one for own in beside for one in own.values())]
    owners = [*jobs, *(job for job in jobs for _ in job.components)]
    plan = _one_plan(owners, programs) if to_submit else None
    documents = []
    for job, entry, own in zip(jobs, entries, beside, strict=True):
        if to_submit:
            check_secrets(job)
        document = _as_the_profile_says(job.model_dump(mode="json", exclude_unset=True), cluster.profile)
        _point_into_the_copy(document, job, entry)
        for name, program in own.items():
            _point_into_the_copy(document["components"][name], job.of_component(name), program)
        documents.append(document)
    names = dict.fromkeys(name for job in jobs for name in job.environment.secrets) if to_submit else {}
    git = git_state(next((entry.root for entry in entries if entry.root is not None), base)) if to_submit else None
    return Luggage(
        kind="sweep" if is_sweep else "job" if several is None else "jobs",
        jobs=jobs,
        document={**documents[0], **more} if several is None else {"jobs": {one["name"]: one for one in documents}},
        plan=plan,
        secrets={name: os.environ[name] for name in names},
        commit="" if git is None else git.commit + ("+" if git.dirty else ""),
    )


def _one_plan(jobs: Sequence[JobSpec], entries: Sequence[Entry]) -> CodePlan | None:
    """What goes along: of several jobs the code of all, in one place."""
    plans = []
    for job, entry in zip(jobs, entries, strict=True):
        plan = plan_copy(job, entry, runs_dir=default_runs_dir())
        if plan is None and entry.file is not None:
            raise SpecError(
                f"code.copy is false, and {entry.file} lies on this machine: the cluster does not have it. Leave "
                "code.copy out, or name a program of the cluster's with entrypoint.command"
            )
        if plan is not None:
            plans.append(plan)
    if not plans:
        return None
    if len({plan.root for plan in plans}) > 1:
        folders = ", ".join(sorted({str(plan.root) for plan in plans}))
        raise SpecError(
            f"the programs of these jobs lie in several folders ({folders}), and to a cluster behind SSH the jobs of "
            "one file go with one copy of the code. Put the file beside or above all of them, or submit them one by one"
        )
    files = sorted({name for plan in plans for name in plan.files})
    return CodePlan(root=plans[0].root, files=tuple(files), total_bytes=max(plan.total_bytes for plan in plans))


def _as_the_profile_says(values: dict[str, Any], profile: ClusterProfile) -> dict[str, Any]:
    """The values of a spec as a document; ``${env:NAME}`` of the profile stays what it is: the cluster's to expand."""

    def document(value: Any, default: Any) -> Any:
        if isinstance(value, Mapping):
            below = default if isinstance(default, Mapping) else {}
            return {key: document(one, below.get(key)) for key, one in value.items()}
        return value if value == default else escape(value)

    found = document(values, profile.defaults().values)
    assert isinstance(found, dict)
    return found


def _point_into_the_copy(document: dict[str, Any], job: JobSpec, entry: Entry) -> None:
    """Paths of this machine have no meaning there: the program's own becomes one in the code that is sent."""
    if entry.file is None or entry.root is None:
        return
    inside = "./" + entry.file.relative_to(entry.root).as_posix()
    if job.entrypoint.script is not None:
        document["entrypoint"]["script"] = inside
    elif job.entrypoint.command is not None:
        document["entrypoint"]["command"][0] = inside


def sent_facts(cluster: RemoteCluster) -> str | None:
    """What a probe has found out of the cluster, as it lies here; None where nobody has probed."""
    try:
        return facts_path(cluster.name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def asked(
    cluster: RemoteCluster,
    luggage: Luggage,
    command: Sequence[str],
    *,
    runs_dir: str | None = None,
    facts: bool = True,
    columns: int | None,
) -> Handed:
    """What a command says there of a spec that is not submitted, such as ``plan``; its options stand in ``command``."""
    request = {
        **cluster.introduction(runs_dir),
        "do": "look",
        "document": dict(luggage.document),
        "command": list(command),
        "facts": sent_facts(cluster) if facts else None,
        "terminal_columns": columns,
    }
    found: Handed = cluster.again(lambda: cluster.converse(request, _hear))
    return found


def hand_over(
    cluster: RemoteCluster,
    luggage: Luggage,
    options: Sequence[str],
    *,
    runs_dir: str | None,
    dry_run: bool,
    columns: int | None,
    facts: bool = True,
    key: str | None = None,
    show: Callable[[Handed], None] = lambda handed: None,
) -> Handed:
    """Send code and spec, and submit there: once, however often the connection breaks or this is repeated.

    Args:
        options: further ones of the command there.
        columns: how wide the terminal is here; None where the output is none.
        facts: let it be held against the facts that are stored here.
        key: of the caller's own, under which the same is submitted once.
        show: prints the answer. Who is killed before that gives the command again, which must find this run.
    """
    with ExitStack() as stack:
        place = None
        if luggage.plan is not None:
            archive = stack.enter_context(code.archived(luggage.plan))
            place = (archive.hash, code.send(cluster, archive, runs_dir=runs_dir))
        contents = {
            "kind": luggage.kind,
            "document": dict(luggage.document),
            "code": None if place is None else place[0],
            "options": list(options),
            "runs_dir": runs_dir,
            **({} if key is None else {"key": key}),
        }
        same = {**contents, "options": [option for option in options if option != "--json"]}
        pending = stack.enter_context(remote_index.pending_submission(cluster.name, same))
        request = {
            **cluster.introduction(runs_dir),
            **contents,
            "do": "submit",
            "code": None if place is None else place[1],
            "key": None if dry_run else key or pending.key,
            "facts": sent_facts(cluster) if facts else None,
            "id": uuid.uuid4().hex,
            "env": dict(luggage.secrets),
            "commit": luggage.commit,
            "from": submitted_from(),
            "terminal_columns": columns,
        }
        found: Handed = cluster.again(lambda: cluster.converse(request, _hear))
        declared = {job.name: job.environment.secrets for job in luggage.jobs}
        for run in found.runs:
            names = declared.get(run["name"], []) if luggage.kind == "jobs" else list(luggage.secrets)
            remote_index.remember(cluster.name, run, secrets=names)
        handed = replace(found, repeated=pending.is_repeated)
        show(handed)
        pending.done = not found.open
        return handed


def _hear(conversation: Conversation) -> Handed:
    head, said = conversation.to_the_end()
    run = head.get("run")
    runs = head.get("runs") or ([] if run is None else [run])
    out, err = said.get("out", b""), said.get("err", b"")
    is_open = bool(head.get("open"))
    return Handed(code=int(head["code"]), out=out, err=err, run=run, repeated=False, runs=runs, open=is_open)
