"""What was read of runs earlier, kept for the next command and believed only while the run's files are as they were.

A file for each purpose, in the user's state directory: a JSON line for each run, with the places that were looked at
(every folder of the run, the files that are appended to) and a digest of what the file system says of them: inode,
size, times of the last change. Whoever wants a line looks at these places again. A run that was deleted, moved,
replaced or written to since has another digest and is read anew; a torn line, or one of another release, is no line.
Without the files everything is read, which only takes longer.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcaccel import __version__
from hpcaccel.core.run_dir import RunDir, append_bytes, atomic_write, read_lines, state_home

__all__ = ["Look", "Remembered", "look_at", "places_of"]

SETTLING_SECONDS = 10.0
"""What changed so shortly before it was read may change once more within the same tick of a file system's clock."""
MOST_PLACES = 300
_SPARE_LINES = 200
_FORMAT = f"{__version__}/1"
"""Lines of another release, or from before a change of what is kept, are not believed."""


class Look:
    """What the file system said of ``places`` in ``root`` before they were read.

    A place that is not there is an answer, too.
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
    """Where a change of a run shows: its folders, and the files that are appended to in place; None: too many.

    The copy of the code is one place: nothing writes into it.
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


def look_at(run: RunDir) -> Look | None:
    """To be called before the run is read; None for a run of which nothing is to be kept."""
    places = places_of(run)
    return None if places is None else Look(str(run.path), places)


class Remembered:
    """The lines of one purpose. ``write`` keeps what was added for the next command.

    Args:
        purpose: the file's name.
    """

    def __init__(self, purpose: str) -> None:
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
        """What was kept of the run in ``path``, if its places are as they were then. They are looked at once."""
        name = str(path)
        if name not in self._checked:
            self._checked[name] = self._check(name)
        return self._checked[name]

    def _check(self, path: str) -> dict[str, Any] | None:
        line = self._known.get(path, {})
        places, value = line.get("places"), line.get("value")
        if not (isinstance(places, list) and all(isinstance(place, str) for place in places)):
            return None
        if not isinstance(value, dict) or Look(path, places).digest != line.get("digest"):
            del self._known[path]
            return None
        return value

    def keep(self, look: Look | None, value: Mapping[str, Any]) -> None:
        """Remember ``value``, which was read after ``look``."""
        if look is None or not look.is_settled:
            return
        line = {"version": _FORMAT, "path": look.root, "places": list(look.places), "digest": look.digest}
        self._added.append({**line, "value": dict(value)})

    def write(self) -> None:
        """Add to the file; where most of it is out of date, write it anew with the runs that are still there.

        A state directory that cannot be written only costs time.
        """
        try:
            if self._added:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                append_bytes(self._path, b"".join(map(_line, self._added)))
            known = {**self._known, **{line["path"]: line for line in self._added}}
            if self._lines + len(self._added) > 2 * len(known) + _SPARE_LINES:
                kept = [line for path, line in known.items() if os.path.exists(path)]
                atomic_write(self._path, b"".join(map(_line, kept)), sync=False)
        except OSError:
            return
        self._added = []

    def _read(self) -> list[dict[str, Any]]:
        try:
            return [line for line, _ in read_lines(self._path)]
        except OSError:
            return []


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
