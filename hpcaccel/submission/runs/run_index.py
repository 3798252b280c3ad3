"""A cache of facts that commands read from runs, valid only while the run's files are unchanged.

Each purpose has a file in the user's state directory, with a JSON line per run: the paths that were checked, such as
the run's folders and its ledger, and a digest of their inodes, sizes and modification times. A line is used only after
its paths are checked again. A run that was moved or replaced, or whose paths changed, is read again. Torn
lines, and lines of other releases, are ignored. Without the cache, commands read everything and take longer.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcaccel import __version__
from hpcaccel.core.durable_files import append_bytes, atomic_write, read_lines
from hpcaccel.core.run_dir import RunDir, state_home

__all__ = ["SETTLING_SECONDS", "CachedOverview", "DirectoryStat", "look_at", "places_of"]

SETTLING_SECONDS = 10.0
"""A run that changed within this time before it was read is not cached: it may change again within one tick of the
file system's clock."""
MOST_PLACES = 300
"""Runs with more paths to check than this are not cached."""
_SPARE_LINES = 200
"""A cache file is rewritten if it has more lines than this number plus two per run."""
_FORMAT = f"{__version__}/1"
"""Lines of another release or format are ignored."""


class DirectoryStat:
    """A digest of the metadata of ``places`` in ``root``, taken before they are read.

    Missing paths are part of the digest.
    """

    def __init__(self, root: str, places: Sequence[str]) -> None:
        self.root = root
        self.places = places
        digest = hashlib.blake2b(digest_size=16)
        newest = 0
        for place in places:
            try:
                facts = os.stat(os.path.join(root, place))
            except OSError:
                digest.update(b"-")
                continue
            changed = max(facts.st_mtime_ns, facts.st_ctime_ns)
            newest = max(newest, changed)
            size = 0 if stat.S_ISDIR(facts.st_mode) else facts.st_size
            digest.update(f"{facts.st_ino} {size} {facts.st_mtime_ns} {facts.st_ctime_ns};".encode())
        self.digest = digest.hexdigest()
        self.is_settled = newest / 1e9 < time.time() - SETTLING_SECONDS


def places_of(run: RunDir) -> list[str] | None:
    """The paths that show a change of a run: folders, record, spec and JSON-lines files. None if there are too many.

    The copy of the code counts as one path, because nothing writes into it.
    """
    places = [path.name for path in (run.record, run.ledger, run.metrics, run.spec)]
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        places.append(folder)
        if len(places) > MOST_PLACES:
            return None
        try:
            entries = sorted(os.scandir(run.path / folder), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            name = os.path.join(folder, entry.name)
            if entry.is_dir(follow_symlinks=False):
                if name == run.code.name:
                    places.append(name)
                else:
                    waiting.append(name)
            elif folder and name.endswith(".jsonl"):
                places.append(name)
    return places


def look_at(run: RunDir) -> DirectoryStat | None:
    """The metadata of a run, to be taken before the run is read; None if it has too many paths to be cached."""
    places = places_of(run)
    return None if places is None else DirectoryStat(str(run.path), places)


class CachedOverview:
    """The lines for one purpose. ``write`` stores the added lines for the next command.

    Args:
        purpose: the name of the cache file, without suffix.
        only: the runs that will be looked up; None for all. The lines of other runs are not parsed.
    """

    def __init__(self, purpose: str, *, only: Collection[Path] | None = None) -> None:
        self._only = None if only is None else {_text(str(path)) for path in only}
        self._path = state_home() / "hpcaccel" / "remembered" / f"{purpose}.jsonl"
        self._lines = 0
        self._known: dict[str, dict[str, Any]] = {}
        self._checked: dict[str, dict[str, Any] | None] = {}
        self._added: list[dict[str, Any]] = []
        for line in self._read():
            self._lines += 1
            if line.get("version") == _FORMAT and isinstance(line.get("path"), str):
                self._known[line["path"]] = line

    def recall(self, path: str | Path) -> dict[str, Any] | None:
        """The cached value of the run in ``path`` if its paths are unchanged, else None. The paths are checked once."""
        name = str(path)
        if name not in self._checked:
            self._checked[name] = self._check(name)
        return self._checked[name]

    def digest_of(self, path: str) -> str:
        """The digest with which the value of the run in ``path`` was cached; ``recall`` has found it valid."""
        return str(self._known[path]["digest"])

    def _check(self, path: str) -> dict[str, Any] | None:
        line = self._known.get(path, {})
        places, value = line.get("places"), line.get("value")
        if not (isinstance(places, list) and all(isinstance(place, str) for place in places)):
            return None
        if not isinstance(value, dict) or DirectoryStat(path, places).digest != line.get("digest"):
            del self._known[path]
            return None
        return value

    def keep(self, look: DirectoryStat | None, value: Mapping[str, Any]) -> None:
        """Cache ``value``, which was read from the run after ``look`` was taken."""
        if look is None or not look.is_settled:
            return
        line = {"version": _FORMAT, "path": look.root, "places": list(look.places), "digest": look.digest}
        self._added.append({**line, "value": dict(value)})

    def write(self) -> None:
        """Append the added lines to the file. If most lines are outdated, rewrite the file with only existing runs.

        An unwritable state directory is ignored: the next command only takes longer.
        """
        try:
            if self._added:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                append_bytes(self._path, b"".join(map(_line, self._added)))
            known = {**self._known, **{line["path"]: line for line in self._added}}
            if self._only is None and self._lines + len(self._added) > 2 * len(known) + _SPARE_LINES:
                kept = [line for path, line in known.items() if os.path.exists(path)]
                atomic_write(self._path, b"".join(map(_line, kept)), sync=False)
        except OSError:
            return
        self._added = []

    def _read(self) -> list[dict[str, Any]]:
        try:
            lines = self._path.read_bytes().split(b"\n")[:-1]
        except OSError:
            return []
        if self._only is not None:
            lines = [line for line in lines if line.partition(b'"path":')[2].partition(b',"places":')[0] in self._only]
        try:
            values = json.loads(b"[" + b",".join(lines) + b"]")  # three times as fast as line by line
        except ValueError:
            return [line for line, _ in read_lines(self._path)]  # without torn lines
        return [value for value in values if isinstance(value, dict)]


def _line(value: Mapping[str, Any]) -> bytes:
    return _text(value) + b"\n"


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
