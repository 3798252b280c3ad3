"""Which cluster behind SSH a command is about, by the runs and checkpoints that it names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccel.cli.forwarding import behind_ssh, behind_ssh_run
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.submission.remote.cluster import RemoteCluster

__all__ = ["meant_cluster", "named_there"]

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
    from hpcaccel import layout

    if os.sep in str(path):
        return True
    places = (path, path / "checkpoints")
    return path.is_file() or any((one / layout.MANIFEST).exists() or layout.step_directories(one) for one in places)


def named_there(cluster: RemoteCluster, text: str) -> str:
    """``alps:gpt@100`` and ``afterany:alps:gpt`` as they are said on alps itself."""
    own = f"{cluster.name}:"
    kind, colon, rest = text.partition(":")
    if colon and rest.startswith(own):
        return f"{kind}:{rest.removeprefix(own)}"
    return text.removeprefix(own)
