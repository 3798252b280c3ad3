"""This side: what a submission takes along, and handing it in."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel.errors import SpecError
from hpcaccel.rundir import default_runs_dir
from hpcaccel.spec import JobSpec, load_spec, load_sweep
from hpcaccel.spec.expand import escape
from hpcaccel.submission.codecopy import CodePlan
from hpcaccel.submission.entry import Entry, check_secrets, find_entry, plan_copy
from hpcaccel.submission.provenance import git_state, submitted_from
from hpcaccel.submission.remote import code, memory
from hpcaccel.submission.remote.cluster import Conversation, RemoteCluster

__all__ = ["Handed", "Luggage", "hand_over", "pack"]


@dataclass(frozen=True, kw_only=True)
class Luggage:
    """A spec with all that was said about it here, ready to be read on the cluster."""

    kind: str
    """``job`` or ``sweep``."""
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
    """``run_id``, ``name``, ``job_id``, ``path``; None where nothing was submitted."""
    repeated: bool
    """It was asked for earlier, and the answer did not arrive then."""


def pack(cluster: RemoteCluster, file: str, overrides: Sequence[str], *, is_sweep: bool) -> Luggage:
    """Load a spec file with the cluster's defaults and choose what goes along; mistakes are found here.

    Raises:
        SpecError: with a line for each thing that is wrong; also secrets that are not set here.
    """
    if is_sweep:
        sweep = load_sweep(file, overrides=overrides, profile=cluster.profile)
        job, more = sweep.job, {"sweep": sweep.sweep.model_dump(mode="json", exclude_unset=True)}
    else:
        job, more = load_spec(file, overrides=overrides, profile=cluster.profile), {}
    check_secrets(job)
    base = Path(os.path.abspath(file)).parent
    entry = find_entry(job, base=base, workdir=base)
    plan = plan_copy(job, entry, runs_dir=default_runs_dir())
    git = git_state(entry.root or base)
    document = escape({**job.model_dump(mode="json", exclude_unset=True), **more})
    assert isinstance(document, dict)
    _point_into_the_copy(document, job, entry, plan)
    return Luggage(
        kind="sweep" if is_sweep else "job",
        document=document,
        plan=plan,
        secrets={name: os.environ[name] for name in job.environment.secrets},
        commit="" if git is None else git.commit + ("+" if git.dirty else ""),
    )


def _point_into_the_copy(document: dict[str, Any], job: JobSpec, entry: Entry, plan: CodePlan | None) -> None:
    """Paths of this machine have no meaning there: the program's own becomes one in the code that is sent."""
    if entry.file is None or entry.root is None:
        return
    if plan is None:
        raise SpecError(
            f"code.copy is false, and {entry.file} lies on this machine: the cluster does not have it. Leave code.copy "
            "out, or name a program of the cluster's with entrypoint.command"
        )
    inside = "./" + entry.file.relative_to(entry.root).as_posix()
    if job.entrypoint.script is not None:
        document["entrypoint"]["script"] = inside
    elif job.entrypoint.command is not None:
        document["entrypoint"]["command"][0] = inside


def hand_over(
    cluster: RemoteCluster,
    luggage: Luggage,
    options: Sequence[str],
    *,
    runs_dir: str | None,
    dry_run: bool,
    columns: int,
) -> Handed:
    """Send code and spec, and submit there: once, however often the connection breaks or this is repeated.

    Args:
        options: further ones of the command there.
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
        }
        pending = stack.enter_context(memory.pending_submission(cluster.name, contents))
        request = {
            **cluster.introduction(runs_dir),
            **contents,
            "do": "submit",
            "code": None if place is None else place[1],
            "key": None if dry_run else pending.key,
            "id": uuid.uuid4().hex,
            "env": dict(luggage.secrets),
            "commit": luggage.commit,
            "from": submitted_from(),
            "columns": columns,
        }
        found: Handed = cluster.again(lambda: cluster.converse(request, _hear))
        if found.run is not None:
            memory.remember(cluster.name, found.run)
        pending.done = True
        return Handed(code=found.code, out=found.out, err=found.err, run=found.run, repeated=pending.is_repeated)


def _hear(conversation: Conversation) -> Handed:
    out = err = b""
    while True:
        head, payload = conversation.frame()
        if head["frame"] == "exit":
            return Handed(code=int(head["code"]), out=out, err=err, run=head.get("run"), repeated=False)
        if head["frame"] == "out":
            out += payload
        else:
            err += payload
