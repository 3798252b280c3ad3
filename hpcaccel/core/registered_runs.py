"""The index of a user's runs, through which commands find them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import append_line, read_lines
from hpcaccel.core.run_dir import RunDir, state_home

__all__ = ["RunIndex", "index_lines", "register"]


def _index_path() -> Path:
    return state_home() / "hpcaccel" / "runs.jsonl"


def register(run: RunDir, *, name: str, job_id: str) -> None:
    """Add a run to the user's index. If the state folder is not writable, the run can be found only in its
    runs directory or by its path."""
    path = _index_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        append_line(path, {"run_id": run.run_id, "name": name, "job_id": job_id, "path": str(run.path)})
    except OSError:
        return


def index_lines() -> list[dict[str, Any]]:
    """All runs in the index, oldest first: ``run_id``, ``name``, ``job_id`` and ``path`` of each."""
    return [line for line, _ in read_lines(_index_path())]


class RunIndex:
    """The paths in the index, for a process that reads them repeatedly: a later read parses only the added lines."""

    def __init__(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._end = 0
        self._paths: dict[str, None] = {}

    def paths(self) -> list[str]:
        """The absolute paths of all runs in the index, oldest first, each once."""
        path = _index_path()
        try:
            facts = os.stat(path)
        except OSError:
            return []
        identity = (facts.st_dev, facts.st_ino)
        if identity != self._identity or facts.st_size < self._end:  # another file, or it was cut
            self._identity, self._end, self._paths = identity, 0, {}
        for line, end in read_lines(path, offset=self._end):
            self._end = end
            if isinstance(found := line.get("path"), str):
                self._paths[os.path.abspath(found)] = None
        return list(self._paths)
