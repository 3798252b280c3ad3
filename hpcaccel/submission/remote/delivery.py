"""Delivery of a bundle to a cluster behind SSH: a command there that checks the spec, or the submission, once."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from hpcaccel.spec.cluster.cluster_facts import facts_path
from hpcaccel.submission.code.provenance import submitted_from
from hpcaccel.submission.remote import archives as code
from hpcaccel.submission.remote import remote_index
from hpcaccel.submission.remote.bundle import SubmissionBundle
from hpcaccel.submission.remote.remote_cluster import RemoteCluster, RemoteRequest

__all__ = ["BundleReceipt", "asked", "hand_over"]


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
    earlier: bool = False
    """Whether an earlier request with the caller's key had submitted the run."""


def _sent_facts(cluster: RemoteCluster) -> str | None:
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
        "facts": _sent_facts(cluster) if facts else None,
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
            "facts": _sent_facts(cluster) if facts else None,
            "id": uuid.uuid4().hex,
            "env": dict(bundle.secrets),
            "commit": bundle.commit,
            "from": submitted_from(),
            "terminal_columns": columns,
        }
        found, tries = _sent(cluster, request)
        known = _remember(cluster.name, bundle, found)
        earlier = known or (found.earlier and tries == 1)  # else it may be the run of this call's own first try
        handed = replace(found, repeated=pending.is_repeated, earlier=earlier)
        show(handed)
        pending.done = not found.open
        return handed


def _sent(cluster: RemoteCluster, request: dict[str, Any]) -> tuple[BundleReceipt, int]:
    """Send a request until there is a reply. Returns the reply and the number of tries."""
    tries = 0

    def send() -> BundleReceipt:
        nonlocal tries
        tries += 1
        receipt: BundleReceipt = cluster.converse(request, _read_receipt)
        return receipt

    return cluster.again(send), tries


def _remember(cluster: str, bundle: SubmissionBundle, found: BundleReceipt) -> bool:
    """Add the submitted runs to this machine's index. Returns whether one of them is in it already."""
    declared = {job.name: job.environment.secrets for job in bundle.jobs}
    entries = [remote_index.remote_of(run["run_id"], cluster=cluster) for run in found.runs]
    for run, entry in zip(found.runs, entries, strict=True):
        if entry is None or entry["job_id"] != run["job_id"]:
            names = declared.get(run["name"], []) if bundle.kind == "jobs" else list(bundle.secrets)
            remote_index.remember(cluster, run, secrets=names)
    return any(entry is not None for entry in entries)


def _read_receipt(conversation: RemoteRequest) -> BundleReceipt:
    head, payloads = conversation.to_the_end()
    run = head.get("run")
    runs = head.get("runs") or ([] if run is None else [run])
    out, err = payloads.get("out", b""), payloads.get("err", b"")
    is_open = bool(head.get("open"))
    return BundleReceipt(
        code=int(head["code"]), out=out, err=err, run=run, repeated=False, runs=runs, open=is_open,
        earlier=bool(head.get("earlier")),
    )  # fmt: skip
