"""Determines the cluster behind SSH that a command targets, from its arguments: --cluster, runs and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccel.cli.output import note
from hpcaccel.errors import RunNotFound, UserError

if TYPE_CHECKING:
    from hpcaccel.spec import ClusterProfile
    from hpcaccel.submission.remote.remote_cluster import RemoteCluster

__all__ = ["behind_ssh", "cluster_of_arguments", "cluster_of_run"]

_RUNS = ("run", "sweep", "runs")
"""Names of the parameters whose values are runs."""
_CHECKPOINTS = ("checkpoint", "place", "places", "source")
"""Names of the parameters whose values are runs, ``RUN@STEP``, or paths on this machine."""


def cluster_of_arguments(values: Mapping[str, Any]) -> tuple[RemoteCluster, dict[str, str]] | None:
    """Find the cluster behind SSH that a command with the arguments ``values`` targets.

    Returns:
        The cluster, and a dict that maps each run in the arguments to its name on the cluster. None if the command
        targets this machine.

    Raises:
        UserError: the arguments refer to runs on several machines, or to a run on a cluster whose profile no longer has
            a host.
    """
    if values.get("cluster") is not None:
        chosen = behind_ssh(values["cluster"])
        return None if chosen is None else (chosen, {})
    tokens = [(name, token) for name in (*_RUNS, *_CHECKPOINTS) for token in _tokens(values.get(name))]
    if not tokens:
        default = behind_ssh(None) if "cluster" in values else None
        return None if default is None else (default, {})
    found = {
        token: _cluster_of_checkpoint(token)
        if name in _CHECKPOINTS
        else cluster_of_run(token, only_sweeps=name == "sweep")
        for name, token in tokens
    }
    places = {None if one is None else one[0].name: token for token, one in found.items()}
    if len(places) > 1:
        where = ", ".join(
            f"{token} {'on this machine' if name is None else f'on {name}'}" for name, token in places.items()
        )
        raise UserError(
            f"the arguments are on different machines ({where}): run the command separately for each machine"
        )
    cluster = next((one[0] for one in found.values() if one is not None), None)
    return None if cluster is None else (cluster, {token: one[1] for token, one in found.items() if one is not None})


def _tokens(value: Any) -> Sequence[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _cluster_of_checkpoint(token: str) -> tuple[RemoteCluster, str] | None:
    """Like :func:`cluster_of_run`, but ``token`` may also be ``RUN@STEP`` or a path."""
    if _has_checkpoints(Path(token).expanduser()):
        return None
    run, at, step = token.rpartition("@")
    found = cluster_of_run(run if at else token)
    return None if found is None else (found[0], f"{found[1]}{at}{step if at else ''}")


def _has_checkpoints(path: Path) -> bool:
    """Whether ``path`` contains a slash, is a file, or is a folder with checkpoints. Other folders may just happen to
    have the name of a run."""
    from hpcaccel import checkpoint_files

    if os.sep in str(path):
        return True
    places = (path, path / "checkpoints")
    return path.is_file() or any(
        (one / checkpoint_files.MANIFEST).exists() or checkpoint_files.step_directories(one) for one in places
    )


def behind_ssh(name: str | None) -> RemoteCluster | None:
    """The cluster of the profile ``name``, or of the default profile if ``name`` is None. Returns None if that cluster
    is not behind SSH."""
    from hpcaccel.cli.rendered_scripts import chosen_profile

    profile = chosen_profile(name)
    return None if profile is None or profile.host is None else _connected(profile)


def cluster_of_run(token: str | None, *, only_sweeps: bool = False) -> tuple[RemoteCluster, str] | None:
    """Returns a run's cluster and the run's name on that cluster, if the run is behind SSH; otherwise None.

    Args:
        token: name of the run; None for the run that was submitted last.
        only_sweeps: as in :func:`hpcaccel.submission.runs.find.find_run`.

    Raises:
        UserError: the run was submitted to a cluster whose profile no longer has a host.
    """
    from hpcaccel.submission.remote.remote_index import remote_of

    if token is None:
        return _latest()
    if os.sep in token:
        return None
    if (named := _with_cluster(token)) is not None:
        return named
    run = remote_of(token, only_sweeps=only_sweeps)
    if run is not None and not _is_here(token, newer_than=run["run_id"], only_sweeps=only_sweeps):
        cluster = behind_ssh(run["cluster"])
        if cluster is None:
            raise UserError(
                f"{token} was submitted to {run['cluster']}, whose profile no longer has a host: add it to the profile"
            )
        base, underscore, index = token.partition("_")
        is_part = underscore and index.isdecimal() and base in (run["run_id"], run["job_id"])
        return cluster, run["run_id"] + (f"_{index}" if is_part else "")
    return _on_default_cluster(token, only_sweeps=only_sweeps)


def _with_cluster(token: str) -> tuple[RemoteCluster, str] | None:
    from hpcaccel.spec import profile_names

    name, colon, rest = token.partition(":")
    if not colon or not rest or name not in profile_names():
        return None
    cluster = behind_ssh(name)
    return None if cluster is None else (cluster, rest)


def _is_here(token: str, *, newer_than: str, only_sweeps: bool) -> bool:
    """Whether ``token`` is the exact id of a run on this machine, or refers to a run on this machine that is newer than
    the run ``newer_than``."""
    from hpcaccel.submission.runs.find import find_run
    from hpcaccel.submission.runs.run_handle import SweepRun

    try:
        found = find_run(token, only_sweeps=only_sweeps)
    except RunNotFound:
        return False
    if only_sweeps and not isinstance(found, SweepRun) and found.run_id != token:
        return False  # a run with the same name as the sweep, which is on the cluster
    return found.run_id > newer_than or found.run_id == token


def _on_default_cluster(token: str, *, only_sweeps: bool) -> tuple[RemoteCluster, str] | None:
    cluster = behind_ssh(None)
    if cluster is None or _is_here(token, newer_than="", only_sweeps=only_sweeps):
        return None
    return cluster, token


def _latest() -> tuple[RemoteCluster, str] | None:
    from hpcaccel.submission import all_runs
    from hpcaccel.submission.remote.remote_index import remote_runs

    there, here = remote_runs(), all_runs()
    if not there or (here and here[-1].run_id > there[-1]["run_id"]):
        return None
    cluster = behind_ssh(there[-1]["cluster"])
    return None if cluster is None else (cluster, there[-1]["run_id"])


def _connected(profile: ClusterProfile) -> RemoteCluster:
    from hpcaccel.submission.remote import RemoteCluster

    return RemoteCluster(profile, note=note)
