"""What this machine remembers of clusters behind SSH: which run is where, which submission may have come through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import append_line, read_lines, state_home
from hpcaccel.submission.pending import Pending, pending

__all__ = [
    "Pending",
    "pending_command",
    "pending_submission",
    "remember",
    "remote_of",
    "remote_runs",
    "secrets_of",
    "state_folder",
]

COMMAND_SECONDS = 3600.0
"""How long a command whose answer did not arrive is taken for the same when it is given again."""


def state_folder() -> Path:
    return state_home() / "hpcaccel"


def _runs_file() -> Path:
    return state_folder() / "remote-runs.jsonl"


def remember(cluster: str, run: Mapping[str, Any], *, secrets: Sequence[str] = ()) -> None:
    """Args:
    run: ``run_id``, ``name``, ``job_id`` and ``path`` (on the cluster), and its ``kind`` where that is known.
    secrets: the names, never the values, that its spec lists under ``environment.secrets``.
    """
    path = _runs_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    known = {key: str(run[key]) for key in ("run_id", "name", "job_id", "path", "kind") if key in run}
    append_line(path, {"cluster": cluster, **known, "secrets": list(secrets)}, sync=True)


def remote_runs() -> list[dict[str, Any]]:
    """All remembered runs, oldest first; ``cluster``, ``run_id``, ``name``, ``job_id``, ``path`` of each."""
    return [line for line, _ in read_lines(_runs_file())]


def secrets_of(cluster: str, token: str) -> frozenset[str]:
    """The secrets, by name, that the run was submitted with from this machine: of these the cluster has been told
    already. None of a run that was submitted from elsewhere, or before this was written down.
    """
    run = remote_of(token, cluster=cluster)
    return frozenset() if run is None else frozenset(run.get("secrets", ()))


def remote_of(token: str, *, cluster: str | None = None, only_sweeps: bool = False) -> dict[str, Any] | None:
    """The remembered run that ``token`` names: its id, ``<id>_3``, a beginning of one, its name, or its job id.

    A beginning that fits runs of several clusters fits none.

    Args:
        cluster: only runs of this one.
        only_sweeps: a name, or the beginning of an id, is that of a sweep where there is one.
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
def pending_submission(cluster: str, contents: Mapping[str, Any]) -> Iterator[Pending]:
    """A key for a submission, on disk before the block begins, and kept when the block does not say that it is done.

    Who submits the same once more gets the same key then, and the cluster makes one job of both. Two calls at the
    same time are two submissions: the file is locked by the one that uses it.
    """
    with pending("remote-submissions", {"cluster": cluster, **contents}, kept_seconds=None) as asked:
        yield asked


@contextmanager
def pending_command(cluster: str, args: Sequence[str]) -> Iterator[Pending]:
    """The same for a command that changes a run, such as ``resume``. After an hour it is a new one: a run that was
    resumed then may have ended long since.
    """
    contents = {"cluster": cluster, "args": list(args)}
    with pending("remote-commands", contents, kept_seconds=COMMAND_SECONDS) as asked:
        yield asked
