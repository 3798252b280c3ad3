"""Files of a ``ResultsFile``, without torch: the parts that the ranks append to, the manifest, and the merged file.

::

    answers.jsonl                     the merged file: a line per item, in the items' order
    answers.jsonl.parts/
        manifest.json                 what the parts belong to, and whether the merged file is complete
        <start>-<rank>.jsonl          one rank's results: a line per batch, {"batch": 3, "results": […]}

``<start>`` is new each time the program starts, so that no two processes append to the same part, not even if a process
of an earlier attempt is still running on a node that has been given up. A batch counts as done if a part has a whole
line for it, and of several lines the first one counts: parts are read in the order of their names, which begin with the
time. So each item is in the merged file once, whatever the parts contain.

What a kill leaves:

- While a rank appends a line: a line without its end. It is not a JSON object, so its batch is done again.
- Before the rename of the merged file: a temporary file, which the next start deletes. All parts still exist.
- After the rename, before the manifest is marked ``complete``: the next start finds all batches in the parts, and
  writes the same file again.
- After that, while the parts are deleted: the next start deletes the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hpcaccel.core.durable_files import (
    append_bytes,
    atomic_writer,
    fsync_directory,
    make_folder,
    read_json,
    temporary_files,
    write_json,
)
from hpcaccel.core.run_dir import new_run_id
from hpcaccel.errors import RuntimeMisuse

__all__ = ["Plan", "ResultParts"]

VERSION = 1

OPEN_PARTS = 16
"""Maximum number of parts that are open at a time. Each rank of each attempt has one."""


@dataclass(frozen=True)
class Plan:
    """Items, batch size and settings of the results. An interrupted program must be continued with the same plan."""

    items: int
    """Number of items."""
    digest: str
    """SHA-256 of the items."""
    batch_size: int
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, items: Sequence[Any], *, batch_size: int, settings: Mapping[str, Any]) -> Plan:
        """The plan for these items.

        Raises:
            RuntimeMisuse: an item, or a value of ``settings``, cannot be written as JSON.
        """
        digest = hashlib.sha256()
        for number, item in enumerate(items):
            digest.update(as_json(item, f"item {number}") + b"\n")
        return cls(len(items), digest.hexdigest(), batch_size, json.loads(as_json(settings, "settings")))

    @property
    def batches(self) -> int:
        return -(-self.items // self.batch_size)

    def span(self, batch: int) -> range:
        """Indices of the items in batch ``batch``. The last batch may be smaller than the others."""
        return range(batch * self.batch_size, min((batch + 1) * self.batch_size, self.items))


def as_json(value: Any, what: str) -> bytes:
    """``value`` as JSON on one line.

    Args:
        what: name of the value, for the message of the error.

    Raises:
        RuntimeMisuse: it cannot be written as JSON.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as in a text that was cut off
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise RuntimeMisuse(
            f"{what} cannot be written as JSON ({error}): {value!r:.100}. Use strings, numbers, lists and dicts: for a "
            "tensor tensor.tolist(), for a path str(path), for NaN or infinity None"
        ) from None


class ResultParts:
    """The files of a ``ResultsFile``: parts, manifest and merged file. The constructor accesses no file."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path
        self.folder = path.with_name(f"{path.name}.parts")
        self._plan = plan

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    def part(self, start: str, rank: int) -> Path:
        """The part of a rank in the start ``start`` of the program."""
        return self.folder / f"{start}-{rank:05d}.jsonl"

    # -- on rank 0 ----------------------------------------------------------------------------------------------------

    def open(self) -> tuple[str, list[int] | None]:
        """Start, or continue what an earlier start of the program has left.

        Returns:
            A name for this start, and the numbers of the batches without results; None if the merged file is complete.

        Raises:
            RuntimeMisuse: the parts belong to other items or settings; or the file exists and was not written by a
                ``ResultsFile``.
            OSError: a file cannot be read or written.
        """
        found = read_json(self.manifest)
        if found is not None:
            self._refuse_another_plan(found)
            if found["complete"] and self.path.exists():
                self._delete_parts()
                return new_run_id(), None
        elif self.path.exists():
            raise RuntimeMisuse(
                f"{self.path} exists, but {self.manifest} is missing, so it is unknown to which items the results "
                "belong. Move the file, or write to another one"
            )
        if found is None or found["complete"]:  # the merged file of a complete one was deleted: compute it again
            make_folder(self.folder)
            self._write_manifest(complete=False)
        for left in temporary_files(self.path):
            left.unlink(missing_ok=True)
        done = self.find()
        return new_run_id(), [batch for batch in range(self._plan.batches) if batch not in done]

    def find(self, also: Iterable[Path] = ()) -> dict[int, tuple[Path, int]]:
        """For each batch with results: the part, and the offset of the line in it, in bytes.

        Args:
            also: parts that are read if they exist, even if a network file system does not list them yet.
        """
        found: dict[int, tuple[Path, int]] = {}
        for part in sorted({*self.folder.glob("*.jsonl"), *(path for path in also if path.exists())}):
            for batch, offset in self._lines(part):
                found.setdefault(batch, (part, offset))
        return found

    def merge(self, items: Sequence[Any], also: Iterable[Path]) -> list[int]:
        """Write the merged file, then delete the parts.

        Args:
            also: parts of this start, as in ``find``.

        Returns:
            Numbers of the batches without results. If there are any, nothing is written.

        Raises:
            OSError: a file cannot be read or written. The parts are then kept.
        """
        found = self.find(also)
        missing = [batch for batch in range(self._plan.batches) if batch not in found]
        if missing:
            return missing
        with atomic_writer(self.path) as merged, _line_reader() as line_at:
            for batch in range(self._plan.batches):
                results = json.loads(line_at(*found[batch]))["results"]
                for number, result in zip(self._plan.span(batch), results, strict=True):
                    line = {"index": number, "item": items[number], "result": result}
                    merged.write(as_json(line, f"result {number}") + b"\n")
        self._write_manifest(complete=True)
        self._delete_parts()
        return []

    def _lines(self, part: Path) -> Iterator[tuple[int, int]]:
        """The batches in a part, each with the offset of its line. Torn lines are skipped."""
        offset = 0
        with part.open("rb") as file:
            for line in file:
                batch = self._batch_of(line)
                if batch is not None:
                    yield batch, offset
                offset += len(line)

    def _batch_of(self, line: bytes) -> int | None:
        """The batch that a line of a part has the results of; None if the line is not whole."""
        if not line.endswith(b"\n"):
            return None
        try:
            value = json.loads(line)
            batch, count = value["batch"], len(value["results"])
        except (ValueError, TypeError, KeyError):
            return None
        known = isinstance(batch, int) and 0 <= batch < self._plan.batches
        return batch if known and count == len(self._plan.span(batch)) else None

    def _write_manifest(self, *, complete: bool) -> None:
        plan = self._plan
        about = {"items": plan.items, "digest": plan.digest, "batch_size": plan.batch_size, "settings": plan.settings}
        write_json(self.manifest, {"version": VERSION, **about, "complete": complete})

    def _refuse_another_plan(self, found: Mapping[str, Any]) -> None:
        plan = self._plan
        for name, ours in (("items", plan.items), ("batch_size", plan.batch_size), ("settings", plan.settings)):
            if found[name] != ours:
                raise RuntimeMisuse(
                    f"{self.folder} has results with {name}={found[name]!r}, but this program has {name}={ours!r}. "
                    f"Continue with {name}={found[name]!r}, write to another file, or delete {self.path} and the folder"
                )
        if found["digest"] != plan.digest:
            raise RuntimeMisuse(
                f"{self.folder} has results for {plan.items} different items: the order or the text of some items has "
                f"changed. Continue with the same items, write to another file, or delete {self.path} and the folder"
            )

    def _delete_parts(self) -> None:
        for part in self.folder.glob("*.jsonl"):
            part.unlink(missing_ok=True)
        fsync_directory(self.folder)


@contextmanager
def _line_reader() -> Iterator[Callable[[Path, int], bytes]]:
    """Yields a function that reads the line of a part at an offset in bytes. At most ``OPEN_PARTS`` are open."""
    files: dict[Path, BinaryIO] = {}  # least recently used part first

    def line_at(part: Path, offset: int) -> bytes:
        if part not in files and len(files) >= OPEN_PARTS:
            files.pop(next(iter(files))).close()
        file = files.pop(part) if part in files else part.open("rb")
        files[part] = file
        file.seek(offset)
        return file.readline()

    try:
        yield line_at
    finally:
        for file in files.values():
            file.close()


def append_results(part: Path, batch: int, results: Sequence[Any], *, first: int) -> None:
    """Append the results of a batch to a part. They are on the disk when this returns.

    Args:
        first: number of the batch's first item, for the message of the error.

    Raises:
        RuntimeMisuse: a result cannot be written as JSON.
        OSError: the file cannot be written.
    """
    values = b",".join(
        as_json(result, f"result {place} of batch {batch} (item {first + place})")
        for place, result in enumerate(results)
    )
    append_bytes(part, b'{"batch":%d,"results":[%b]}\n' % (batch, values), sync=True)
