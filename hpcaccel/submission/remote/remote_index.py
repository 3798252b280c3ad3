"""This machine's index of runs on clusters behind SSH, and keys of submissions and commands without a reply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import append_line, read_lines
from hpcaccel.core.run_dir import state_home
from hpcaccel.submission.submit.comparison import PendingKey, pending_key

__all__ = [
    "PendingKey",
    "name_there",
    "pending_command",
    "pending_submission",
    "remember",
    "remote_of",
    "remote_runs",
    "secrets_of",
    "state_folder",
]

COMMAND_SECONDS = 3600.0
"""Time within which a command that got no reply has the same key when it is repeated."""


def state_folder() -> Path:
    return state_home() / "hpcaccel"


def _runs_file() -> Path:
    return state_folder() / "remote-runs.jsonl"


def remember(cluster: str, run: Mapping[str, Any], *, secrets: Sequence[str] = ()) -> None:
    """Add a run to the index.

    Args:
        run: ``run_id``, ``name``, ``job_id`` and ``path`` (on the cluster), and its ``kind`` if known.
        secrets: the names, never the values, of ``environment.secrets`` in the run's spec.
    """
    path = _runs_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    known = {key: str(run[key]) for key in ("run_id", "name", "job_id", "path", "kind") if key in run}
    append_line(path, {"cluster": cluster, **known, "secrets": list(secrets)}, sync=True)


def remote_runs() -> list[dict[str, Any]]:
    """All runs in the index, oldest first, with ``cluster``, ``run_id``, ``name``, ``job_id`` and ``path``."""
    return [line for line, _ in read_lines(_runs_file())]


def secrets_of(cluster: str, token: str) -> frozenset[str]:
    """The names of the run's secrets, if it was submitted from this machine; empty for other runs."""
    run = remote_of(token, cluster=cluster)
    return frozenset() if run is None else frozenset(run.get("secrets", ()))


def name_there(cluster: str, text: str) -> str:
    """A run's name on its cluster: ``gpt@9`` for ``alps:gpt@9``, and ``afterok:gpt`` for ``afterok:alps:gpt``."""
    own = f"{cluster}:"
    kind, colon, rest = text.partition(":")
    if colon and rest.startswith(own):
        return f"{kind}:{rest.removeprefix(own)}"
    return text.removeprefix(own)


def remote_of(token: str, *, cluster: str | None = None, only_sweeps: bool = False) -> dict[str, Any] | None:
    """Find a run in the index by run id (or ``<id>_3``), name, job id, or unique prefix of a run id; None without one.

    Args:
        cluster: only runs on this cluster.
        only_sweeps: prefer sweeps if a name matches several runs.
    """
    runs = [run for run in reversed(remote_runs()) if cluster in (None, run["cluster"])]
    if only_sweeps:  # a stable sort: the newest of each kind stays first
        runs.sort(key=lambda run: run.get("kind", "sweep") != "sweep")
    base = token.partition("_")[0]
    found: dict[str, Any] | None
    for fits in (
        lambda run: run["run_id"] in (token, base),
        lambda run: run["name"] == token,
        lambda run: run["job_id"] in (token, base),
    ):
        if (found := next(filter(fits, runs), None)) is not None:
            return dict(found)
    begins: list[dict[str, Any]] = [run for run in runs if token and run["run_id"].startswith(token)]
    return dict(begins[0]) if len({run["run_id"] for run in begins}) == 1 else None


@contextmanager
def pending_submission(cluster: str, contents: Mapping[str, Any]) -> Iterator[PendingKey]:
    """A key for a submission, on disk before the block begins and kept until the block sets ``done``.

    A repeated submission gets the same key, so that the cluster submits one job for both. Concurrent calls are separate
    submissions.
    """
    with pending_key("remote-submissions", {"cluster": cluster, **contents}, kept_seconds=None) as pending:
        yield pending


@contextmanager
def pending_command(cluster: str, args: Sequence[str]) -> Iterator[PendingKey]:
    """A key for a command that changes a run, such as ``resume``.

    After an hour the same command gets a new key, because the run may have ended in the meantime.
    """
    contents = {"cluster": cluster, "args": list(args)}
    with pending_key("remote-commands", contents, kept_seconds=COMMAND_SECONDS) as pending:
        yield pending
