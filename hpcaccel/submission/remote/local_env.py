"""This side: what ``${env:NAME}`` means in a spec that is for a cluster behind SSH."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcaccel.spec.expand import Elsewhere, expanded_for
from hpcaccel.spec.files import MAX_FILE_BYTES
from hpcaccel.spec.pipes import is_pipe, read_pipe
from hpcaccel.submission.remote.remote_cluster import Conversation, RemoteCluster

__all__ = ["meant_for"]

_NAME = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)


@contextmanager
def meant_for(cluster: RemoteCluster, file: Path) -> Iterator[None]:
    """In the block spec files are read for ``cluster``; it is asked only where a variable is met, and once.

    Args:
        file: the one that is going to be read; all variables that it names are asked for together.
    """
    known: dict[str, str | None] = {}

    def variable(name: str) -> str | None:
        if name not in known:
            try:
                named = set(_NAME.findall(_text(file)))
            except OSError:
                named = set()  # reading it as a spec says what is wrong
            request: dict[str, Any] = {"do": "environment", "names": sorted(named | {name})}
            known.update(cluster.again(lambda: cluster.converse(request, _values)))
        return known[name]

    with expanded_for(Elsewhere(cluster.name, variable)):
        yield


def _text(file: Path) -> str:
    data = read_pipe(file, MAX_FILE_BYTES) if is_pipe(file) else file.read_bytes()
    return data.decode("utf-8", "replace")


def _values(conversation: Conversation) -> dict[str, str | None]:
    head, _ = conversation.expect("environment")
    return dict(head["values"])
