"""Which cluster behind SSH a command is about, by the runs and checkpoints that it names."""

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

__all__ = ["behind_ssh", "behind_ssh_run", "meant_cluster", "named_there"]

_RUNS = ("run", "sweep", "runs")
_CHECKPOINTS = ("checkpoint", "place", "places", "source")
"""Arguments that name one or several runs; of checkpoints also ``RUN@STEP``, or a path of this machine."""

Words = dict[str, str]


def meant_cluster(values: Mapping[str, Any]) -> tuple[RemoteCluster, Words] | None:
    """The cluster of what the arguments ``values`` name, and what that is called there; None: it is here.

    Raises:
        UserError: it is in several places.
    """
    if values.get("cluster") is not None:
        chosen = behind_ssh(values["cluster"])
        return None if chosen is None else (chosen, {})
    tokens = [(name, token) for name in (*_RUNS, *_CHECKPOINTS) for token in _tokens(values.get(name))]
    if not tokens:
        default = behind_ssh(None) if "cluster" in values else None
        return None if default is None else (default, {})
    found = {
        token: _there(token) if name in _CHECKPOINTS else behind_ssh_run(token, only_sweeps=name == "sweep")
        for name, token in tokens
    }
    places = {None if one is None else one[0].name: token for token, one in found.items()}
    if len(places) > 1:
        where = ", ".join(f"{token} {'here' if name is None else f'on {name}'}" for name, token in places.items())
        raise UserError(f"these are in several places ({where}): give the command once for each")
    cluster = next((one[0] for one in found.values() if one is not None), None)
    return None if cluster is None else (cluster, {token: one[1] for token, one in found.items() if one is not None})


def _tokens(value: Any) -> Sequence[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _there(token: str) -> tuple[RemoteCluster, str] | None:
    """Of a checkpoint."""
    if _is_place(Path(token).expanduser()):
        return None
    run, at, step = token.rpartition("@")
    found = behind_ssh_run(run if at else token)
    return None if found is None else (found[0], f"{found[1]}{at}{step if at else ''}")


def _is_place(path: Path) -> bool:
    """Whether a checkpoint, weights, or a directory of such lie there; a folder that bears a run's name is none."""
    from hpcaccel import checkpoint_files

    if os.sep in str(path):
        return True
    places = (path, path / "checkpoints")
    return path.is_file() or any(
        (one / checkpoint_files.MANIFEST).exists() or checkpoint_files.step_directories(one) for one in places
    )


def named_there(cluster: RemoteCluster, text: str) -> str:
    """``alps:gpt@100`` and ``afterany:alps:gpt`` as they are said on alps itself."""
    own = f"{cluster.name}:"
    kind, colon, rest = text.partition(":")
    if colon and rest.startswith(own):
        return f"{kind}:{rest.removeprefix(own)}"
    return text.removeprefix(own)


def behind_ssh(name: str | None) -> RemoteCluster | None:
    """The cluster of the profile ``name`` (the default one without a name), when it is behind SSH."""
    from hpcaccel.cli.cluster_option import chosen_profile

    profile = chosen_profile(name)
    return None if profile is None or profile.host is None else _connected(profile)


def behind_ssh_run(token: str | None, *, only_sweeps: bool = False) -> tuple[RemoteCluster, str] | None:
    """The cluster of the run that ``token`` names (None: the one that was submitted last), when it is behind SSH, and
    what it is called there; ``only_sweeps`` as for :func:`hpcaccel.submission.find.find_run`."""
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
            raise UserError(f"{token} was submitted to {run['cluster']}, whose profile has no host any more")
        base, underscore, index = token.partition("_")
        is_part = underscore and index.isdecimal() and base in (run["run_id"], run["job_id"])
        return cluster, run["run_id"] + (f"_{index}" if is_part else "")
    return _at_the_default(token, only_sweeps=only_sweeps)


def _with_cluster(token: str) -> tuple[RemoteCluster, str] | None:
    from hpcaccel.spec import profile_names

    name, colon, rest = token.partition(":")
    if not colon or not rest or name not in profile_names():
        return None
    cluster = behind_ssh(name)
    return None if cluster is None else (cluster, rest)


def _is_here(token: str, *, newer_than: str, only_sweeps: bool) -> bool:
    """Whether a run of this machine answers to ``token``, and is newer than the one elsewhere."""
    from hpcaccel.submission.find import find_run
    from hpcaccel.submission.run_handle import SweepRun

    try:
        found = find_run(token, only_sweeps=only_sweeps)
    except RunNotFound:
        return False
    if only_sweeps and not isinstance(found, SweepRun) and found.run_id != token:
        return False  # it bears the name, and the sweep is elsewhere
    return found.run_id > newer_than or found.run_id == token


def _at_the_default(token: str, *, only_sweeps: bool) -> tuple[RemoteCluster, str] | None:
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
