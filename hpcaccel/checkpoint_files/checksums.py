"""Reading a checkpoint from end to end and comparing every byte with what was committed; two files at a time."""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import manifest as sealed
from hpcaccel.checkpoint_files.contents import (
    BLOCK_BYTES,
    SHARED_TREE,
    Contents,
    StoredTensor,
    item_bytes,
    rank_tree,
    tensor_nodes,
)
from hpcaccel.checkpoint_files.coverage import covering_problem
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["Report", "Span", "Tell", "check_spans", "verify_ours"]

THREADS = 2
BATCH_BYTES = 16 << 20

Tell = Callable[[int, int], None]
"""Is told how many bytes are done, and of how many."""


@dataclass
class Report:
    """What was found in one checkpoint; good where there are no problems."""

    path: Path
    kind: str
    """``hpcaccel``, ``dcp``, ``safetensors`` or ``torch``."""
    bytes: int = 0
    """So many have been compared with a CRC."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be checked, and why."""

    @property
    def good(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "kind": self.kind,
            "good": self.good,
            "bytes_checked": self.bytes,
            "problems": self.problems,
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Span:
    """Bytes of a file that have a CRC of their own."""

    file: str
    offset: int
    length: int
    crc32: int
    what: str


def verify_ours(path: Path, tell: Tell = lambda done, total: None) -> Report:
    """The checkpoint in ``path``, all of it: manifest, sizes, every byte, and that the chunks cover their tensors."""
    report = Report(path, "hpcaccel")
    try:
        manifest = sealed.read_manifest(path)
    except CheckpointError as error:
        report.problems.append(str(error))
        return report
    report.problems += sealed.wrong_sizes(path, manifest)
    try:
        contents = Contents(path, manifest)
    except (CheckpointError, ValueError, KeyError, TypeError) as error:
        # Without the index there are the CRCs of whole files.
        report.problems.append(
            str(error) if isinstance(error, CheckpointError) else f"{path / sealed.INDEX}: {error!r}"
        )
        spans = list(_whole_files(manifest, set(manifest["files"]) - {sealed.INDEX}))
    else:
        report.problems += _structure_problems(contents)
        spans = list(_spans(contents))
    report.problems += check_spans(path, spans, tell)
    report.bytes = sum(span.length for span in spans) + manifest["files"].get(sealed.INDEX, {}).get("bytes", 0)
    own = {checkpoint_files.MANIFEST, checkpoint_files.PINNED, *manifest["files"]}
    if extra := sorted(entry.name for entry in path.iterdir() if entry.name not in own):
        report.notes.append(f"saved by the script itself, without CRCs: {', '.join(extra)}")
    return report


# -- what the index says


def _structure_problems(contents: Contents) -> Iterator[str]:
    where = contents.path / sealed.INDEX
    files = contents.manifest["files"]
    for tensor in contents.tensors.values():
        for chunk in tensor.chunks:
            if chunk.file not in files:
                yield f"{where}: {tensor.key} lies in {chunk.file}, which is no file of this checkpoint"
            elif chunk.offset + chunk.stored > files[chunk.file]["bytes"]:
                yield f"{where}: {tensor.key} ends behind the end of {chunk.file}"
        if (
            problem := covering_problem(tensor.shape, [(chunk.at, chunk.shape) for chunk in tensor.chunks])
        ) is not None:
            yield f"{where}: {tensor.key} is not covered: {problem}"
        yield from _length_problems(tensor, where)
    yield from _tree_problems(contents)


def _length_problems(tensor: StoredTensor, where: Path) -> Iterator[str]:
    for chunk in tensor.chunks:
        elements = math.prod(chunk.shape)
        if chunk.length != elements * item_bytes(tensor.dtype):
            yield f"{where}: a chunk of {tensor.key} has {chunk.length} bytes for {elements} x {tensor.dtype}"


def _tree_problems(contents: Contents) -> Iterator[str]:
    """Trees that cannot be read, or point to tensors that are not there."""
    if SHARED_TREE not in contents.tensors:
        yield f"{contents.path / sealed.INDEX}: there is no {SHARED_TREE}, which says what the tensors are"
        return
    for key in [SHARED_TREE, *(rank_tree(rank) for rank in contents.ranks)]:
        try:
            nodes = list(tensor_nodes(json.loads(contents.read(key))))
        except Damaged:
            continue  # its bytes are checked with all others, which says it better
        except (OSError, ValueError) as error:
            yield f"{contents.path}: {key} cannot be read: {error}"
            continue
        for node in nodes:
            if node["key"] not in contents.tensors:
                yield f"{contents.path}: {key} holds {node['key']}, whose bytes are nowhere"


def _spans(contents: Contents) -> Iterator[Span]:
    """Every byte of every file but the index: by chunks, where these tile the file, else the file as a whole."""
    by_file: dict[str, list[Span]] = {name: [] for name in contents.manifest["files"] if name != sealed.INDEX}
    for tensor in contents.tensors.values():
        for chunk in tensor.chunks:
            if chunk.file in by_file:
                span = Span(chunk.file, chunk.offset, chunk.stored, chunk.crc32, tensor.key)
                by_file[chunk.file].append(span)
    for name, spans in by_file.items():
        spans.sort(key=lambda span: span.offset)
        end = 0
        for span in spans:
            end = span.offset + span.length if span.offset == end else -1
            if end < 0:
                break
        if end == contents.manifest["files"][name]["bytes"]:
            yield from spans
        else:
            yield from _whole_files(contents.manifest, {name})


def _whole_files(manifest: dict[str, Any], names: Iterable[str]) -> Iterator[Span]:
    for name in sorted(names):
        file = manifest["files"][name]
        yield Span(name, 0, file["bytes"], int(file["crc32"], 16), "the file")


# -- reading


def check_spans(directory: Path, spans: list[Span], tell: Tell) -> list[str]:
    """What is damaged, in words and in the order of the files."""
    total = sum(span.length for span in spans)
    done, lock = 0, threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            tell(done, total)

    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda batch: _check_batch(directory, batch, advance), _batches(spans))
        return [problem for problems in found for problem in problems]


def _batches(spans: list[Span]) -> Iterator[list[Span]]:
    """Neighbours in one file, some megabytes together."""
    batch: list[Span] = []
    size = 0
    for span in spans:
        if batch and (batch[-1].file != span.file or size + span.length > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(span)
        size += span.length
    if batch:
        yield batch


def _check_batch(directory: Path, batch: list[Span], advance: Callable[[int], None]) -> list[str]:
    path = directory / batch[0].file
    try:
        with path.open("rb", buffering=BLOCK_BYTES) as file:
            # What this machine wrote a moment ago is in its memory still; what counts is what the disk has.
            os.posix_fadvise(file.fileno(), batch[0].offset, sum(span.length for span in batch), os.POSIX_FADV_DONTNEED)
            return [problem for span in batch if (problem := _check(path, file, span, advance)) is not None]
    except FileNotFoundError:
        return []  # which the sizes have told already
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]


def _check(path: Path, file: Any, span: Span, advance: Callable[[int], None]) -> str | None:
    file.seek(span.offset)
    crc, left = 0, span.length
    while left:
        block = file.read(min(left, BLOCK_BYTES))
        if not block:
            return f"{path} ends before byte {span.offset + span.length}, inside {span.what}"
        crc = zlib.crc32(block, crc)
        left -= len(block)
        advance(len(block))
    if crc == span.crc32:
        return None
    return f"{path}: {span.what}, {span.length} bytes from byte {span.offset} on, is not what was committed (CRC)"
