"""Submission to a cluster behind SSH: load the spec for that cluster, bundle what it needs, send and submit it."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import default_runs_dir
from hpcaccel.errors import SpecError
from hpcaccel.spec import ClusterProfile, JobSpec, load_spec, load_sweep
from hpcaccel.spec.cluster.cluster_facts import facts_path
from hpcaccel.spec.loading.expand import Elsewhere, escape, expanded_for
from hpcaccel.spec.loading.layers import MAX_FILE_BYTES, base_of, is_pipe, read_pipe
from hpcaccel.spec.loading.workflow import over_profile
from hpcaccel.submission.code.code_copy import CodePlan
from hpcaccel.submission.code.provenance import git_state, submitted_from
from hpcaccel.submission.entrypoint.entry import Entry, check_secrets, find_components, find_entry, plan_copy
from hpcaccel.submission.remote import archives as code
from hpcaccel.submission.remote import remote_index
from hpcaccel.submission.remote.remote_cluster import RemoteCluster, RemoteRequest

__all__ = ["BundleReceipt", "SubmissionBundle", "asked", "expanded_on", "hand_over", "pack", "sent_facts"]


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


@dataclass(frozen=True, kw_only=True)
class BundleReceipt:
    code: int
    out: bytes
    err: bytes
    run: Mapping[str, str] | None
    """The submitted run: ``run_id``, ``name``, ``job_id`` (may be "" if ``open``), ``path``, ``kind``. None if no run
    was submitted, or if the file has several jobs."""
    repeated: bool
    """Whether the same submission was requested earlier, and was interrupted or got no reply."""
    runs: Sequence[Mapping[str, str]] = ()
    """All submitted runs."""
    open: bool = False
    """Whether the outcome is unknown or some jobs are not submitted: repeating the command continues the submission."""


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
        document = _document_for_profile(job.model_dump(mode="json", exclude_unset=True), cluster.profile)
        _use_sent_path(document, job, entry)
        for name, program in own.items():
            _use_sent_path(document["components"][name], job.of_component(name), program)
        documents.append(document)
    names = dict.fromkeys(name for job in jobs for name in job.environment.secrets) if to_submit else {}
    git = git_state(next((entry.root for entry in entries if entry.root is not None), base)) if to_submit else None
    return SubmissionBundle(
        kind="sweep" if is_sweep else "job" if several is None else "jobs",
        jobs=jobs,
        document={**documents[0], **more} if several is None else {"jobs": {one["name"]: one for one in documents}},
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


def sent_facts(cluster: RemoteCluster) -> str | None:
    """The stored facts of the cluster; None if it was not probed."""
    try:
        return facts_path(cluster.name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def asked(
    cluster: RemoteCluster,
    bundle: SubmissionBundle,
    command: Sequence[str],
    *,
    runs_dir: str | None = None,
    facts: bool = True,
    columns: int | None,
) -> BundleReceipt:
    """Run, on the cluster, a command that only checks the spec, such as ``plan`` with its options."""
    request = {
        **cluster.introduction(runs_dir),
        "do": "look",
        "document": dict(bundle.document),
        "command": list(command),
        "facts": sent_facts(cluster) if facts else None,
        "terminal_columns": columns,
    }
    found: BundleReceipt = cluster.again(lambda: cluster.converse(request, _read_receipt))
    return found


def hand_over(
    cluster: RemoteCluster,
    bundle: SubmissionBundle,
    options: Sequence[str],
    *,
    runs_dir: str | None,
    dry_run: bool,
    columns: int | None,
    facts: bool = True,
    key: str | None = None,
    show: Callable[[BundleReceipt], None] = lambda handed: None,
) -> BundleReceipt:
    """Send the code and submit the spec on the cluster, once, even if the connection breaks.

    A call that is repeated after an interruption continues; it does not submit the spec twice.

    Args:
        options: further options of the command on the cluster.
        columns: the width of this terminal; None if the output is not a terminal.
        facts: whether the cluster compares the job with the facts that are stored on this machine.
        key: the caller's key for the submission; if None, a key is made from the submission's contents.
        show: prints the receipt. Until ``show`` returns, a repeated command finds this run.
    """
    with ExitStack() as stack:
        place = None
        if bundle.plan is not None:
            archive = stack.enter_context(code.archived(bundle.plan))
            place = (archive.hash, code.send(cluster, archive, runs_dir=runs_dir))
        contents = {
            "kind": bundle.kind,
            "document": dict(bundle.document),
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
            "env": dict(bundle.secrets),
            "commit": bundle.commit,
            "from": submitted_from(),
            "terminal_columns": columns,
        }
        found: BundleReceipt = cluster.again(lambda: cluster.converse(request, _read_receipt))
        declared = {job.name: job.environment.secrets for job in bundle.jobs}
        for run in found.runs:
            names = declared.get(run["name"], []) if bundle.kind == "jobs" else list(bundle.secrets)
            remote_index.remember(cluster.name, run, secrets=names)
        handed = replace(found, repeated=pending.is_repeated)
        show(handed)
        pending.done = not found.open
        return handed


def _read_receipt(conversation: RemoteRequest) -> BundleReceipt:
    head, payloads = conversation.to_the_end()
    run = head.get("run")
    runs = head.get("runs") or ([] if run is None else [run])
    out, err = payloads.get("out", b""), payloads.get("err", b"")
    is_open = bool(head.get("open"))
    return BundleReceipt(code=int(head["code"]), out=out, err=err, run=run, repeated=False, runs=runs, open=is_open)


_NAME = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)


@contextmanager
def expanded_on(cluster: RemoteCluster, file: Path) -> Iterator[None]:
    """Context manager that expands variables in spec files to their values on ``cluster``, queried when needed.

    Args:
        file: the spec file; all variables in it are queried together.
    """
    known: dict[str, str | None] = {}

    def variable(name: str) -> str | None:
        if name not in known:
            try:
                named = set(_NAME.findall(_text(file)))
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
