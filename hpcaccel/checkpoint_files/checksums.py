"""Verification of a checkpoint: CRCs of its files, and whether the chunks cover their tensors.

Files are read from beginning to end, by two threads.
"""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["Box", "CrcSpan", "OnProgress", "VerifyReport", "check_spans", "covering_problem", "verify_ours"]

THREADS = 2
"""Number of threads that read files and compute CRCs."""
BATCH_BYTES = 16 << 20
"""Maximum total size of the spans that a thread checks at a time. A larger span is checked alone."""

OnProgress = Callable[[int, int], None]
"""Callback with the number of bytes checked so far and the total number of bytes."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The part of a tensor that a chunk holds: offset and shape."""


@dataclass
class VerifyReport:
    """Result of the verification of one checkpoint."""

    path: Path
    kind: str
    """``hpcaccel``, ``dcp``, ``safetensors`` or ``torch``."""
    bytes: int = 0
    """Number of bytes that the checked CRCs cover."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was not checked, and why."""

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
class CrcSpan:
    """A range of bytes of a file that has its own CRC."""

    file: str
    offset: int
    length: int
    crc32: int
    what: str
    """Key of the tensor, or ``the whole file``; for messages."""


def verify_ours(path: Path, on_progress: OnProgress = lambda done, total: None) -> VerifyReport:
    """Verify the checkpoint ``path``: manifest, sizes and CRCs of its files, and that the chunks cover their tensors.

    Files from save hooks have no CRC; they are listed in ``notes``.
    """
    report = VerifyReport(path, "hpcaccel")
    try:
        manifest = sealed.read_manifest(path)
    except CheckpointError as error:
        report.problems.append(str(error))
        return report
    manifest = sealed.with_blocks(path, manifest, report.problems)
    tables_are_good = not report.problems
    report.problems += sealed.wrong_sizes(path, manifest)
    try:
        contents = Contents(path, manifest)
    except (CheckpointError, ValueError, KeyError, TypeError) as error:
        # Without the index, check the CRCs of whole files.
        damaged = list(_damaged_parts(path, manifest))
        if not damaged and tables_are_good:
            damaged = [f"{path / sealed.INDEX} is invalid: {error!r}"]
        report.problems += damaged
        spans = list(_whole_files(manifest, set(manifest["files"]) - set(sealed.index_names(manifest))))
    else:
        report.problems += _structure_problems(contents)
        spans = list(_spans(contents))
    report.problems += check_spans(path, spans, on_progress)
    report.bytes = sum(span.length for span in spans) + manifest["files"].get(sealed.INDEX, {}).get("bytes", 0)
    listed = (name.partition("/")[0] for name in manifest["files"])
    own = {checkpoint_files.MANIFEST, checkpoint_files.PINNED, *manifest.get("blocks", ()), *listed}
    if extra := sorted(entry.name for entry in path.iterdir() if entry.name not in own):
        report.notes.append(f"saved by the script, without CRCs: {', '.join(extra)}")
    report.problems = list(dict.fromkeys(report.problems))
    return report


# -- the index


def _damaged_parts(path: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Messages about files of the index that are missing or damaged; only those whose CRC is known."""
    for name in sealed.index_names(manifest):
        try:
            if name in manifest["files"]:
                sealed.read_listed(path, manifest["files"], name)
        except Damaged as error:
            yield str(error)


def _structure_problems(contents: Contents) -> Iterator[str]:
    where = contents.path / sealed.INDEX
    files = contents.manifest["files"]
    for tensor in contents.tensors.values():
        for chunk in tensor.chunks:
            if chunk.file not in files:
                yield f"{where}: {tensor.key} is in {chunk.file}, which is not a file of this checkpoint"
            elif chunk.offset + chunk.stored > files[chunk.file]["bytes"]:
                yield f"{where}: {tensor.key} extends past the end of {chunk.file}"
        if (
            problem := covering_problem(tensor.shape, [(chunk.at, chunk.shape) for chunk in tensor.chunks])
        ) is not None:
            yield f"{where}: {tensor.key} has invalid chunks: {problem}"
        yield from _length_problems(tensor, where)
    yield from _tree_problems(contents)


def _length_problems(tensor: StoredTensor, where: Path) -> Iterator[str]:
    for chunk in tensor.chunks:
        elements = math.prod(chunk.shape)
        if chunk.length != elements * item_bytes(tensor.dtype):
            yield f"{where}: a chunk of {tensor.key} has {chunk.length} bytes for {elements} elements of {tensor.dtype}"


def _tree_problems(contents: Contents) -> Iterator[str]:
    """Messages about trees that cannot be read or that refer to missing tensors."""
    if SHARED_TREE not in contents.tensors:
        yield f"{contents.path / sealed.INDEX} has no entry {SHARED_TREE!r}, which describes the tensors"
        return
    for key in [SHARED_TREE, *(rank_tree(rank) for rank in contents.ranks)]:
        try:
            nodes = list(tensor_nodes(json.loads(contents.read(key))))
        except Damaged:
            continue  # reported when all bytes are checked
        except (OSError, ValueError) as error:
            yield f"{contents.path}: {key} cannot be read: {error}"
            continue
        for node in nodes:
            if node["key"] not in contents.tensors:
                yield f"{contents.path}: {key} refers to {node['key']}, which is not in the index"


def _spans(contents: Contents) -> Iterator[CrcSpan]:
    """Spans that cover every file except the index: a file's chunks if they tile it, else the whole file."""
    by_file: dict[str, list[CrcSpan]] = {name: [] for name in contents.manifest["files"] if name != sealed.INDEX}
    for tensor in contents.tensors.values():
        for chunk in tensor.chunks:
            if chunk.file in by_file:
                span = CrcSpan(chunk.file, chunk.offset, chunk.stored, chunk.crc32, tensor.key)
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


def _whole_files(manifest: dict[str, Any], names: Iterable[str]) -> Iterator[CrcSpan]:
    for name in sorted(names):
        file = manifest["files"][name]
        yield CrcSpan(name, 0, file["bytes"], int(file["crc32"], 16), "the whole file")


# -- coverage


def covering_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why the boxes do not tile a tensor of ``shape``, with every element in exactly one box; None if they do."""
    for at, size in boxes:
        if len(at) != len(shape) or any(a < 0 or s < 0 or a + s > n for a, s, n in zip(at, size, shape, strict=False)):
            return f"the chunk at {list(at)} of shape {list(size)} is not inside shape {list(shape)}"
    covered, whole = sum(math.prod(size) for _, size in boxes), math.prod(shape)
    if covered < whole:
        return f"number of elements: {covered} in the chunks, {whole} in the tensor"
    if (twins := _overlapping(boxes)) is not None:
        return f"the chunks at {list(twins[0][0])} and {list(twins[1][0])} overlap"
    return None


def _overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that overlap, or None. Boxes are sorted along the first dimension, so that each is compared only with
    those that overlap it in this dimension."""
    solid = [box for box in boxes if math.prod(box[1])]
    if not solid or not solid[0][0]:
        return (solid[0], solid[1]) if len(solid) > 1 else None
    beside: list[Box] = []
    for box in sorted(solid):
        beside = [other for other in beside if other[0][0] + other[1][0] > box[0][0]]
        for other in beside:
            if all(a < b + m and b < a + n for a, n, b, m in zip(box[0], box[1], other[0], other[1], strict=True)):
                return other, box
        beside.append(box)
    return None


# -- reading


def check_spans(directory: Path, spans: list[CrcSpan], on_progress: OnProgress) -> list[str]:
    """Verify the CRC of each span. Returns messages about damaged bytes, in the order of ``spans``."""
    total = sum(span.length for span in spans)
    done, lock = 0, threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            on_progress(done, total)

    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda batch: _check_batch(directory, batch, advance), _batches(spans))
        return [problem for problems in found for problem in problems]


def _batches(spans: list[CrcSpan]) -> Iterator[list[CrcSpan]]:
    """Split spans into batches of one file and at most ``BATCH_BYTES``; a larger span is a batch of its own."""
    batch: list[CrcSpan] = []
    size = 0
    for span in spans:
        if batch and (batch[-1].file != span.file or size + span.length > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(span)
        size += span.length
    if batch:
        yield batch


def _check_batch(directory: Path, batch: list[CrcSpan], advance: Callable[[int], None]) -> list[str]:
    path = directory / batch[0].file
    try:
        with path.open("rb", buffering=BLOCK_BYTES) as file:
            # This machine may have just written the file: drop its cached pages, to check the bytes on the disk.
            os.posix_fadvise(file.fileno(), batch[0].offset, sum(span.length for span in batch), os.POSIX_FADV_DONTNEED)
            return [problem for span in batch if (problem := _check(path, file, span, advance)) is not None]
    except FileNotFoundError:
        return []  # reported by wrong_sizes()
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]


def _check(path: Path, file: Any, span: CrcSpan, advance: Callable[[int], None]) -> str | None:
    file.seek(span.offset)
    crc, left = 0, span.length
    while left:
        block = file.read(min(left, BLOCK_BYTES))
        if not block:
            return f"{path} ends before byte {span.offset + span.length}, within {span.what}"
        crc = zlib.crc32(block, crc)
        left -= len(block)
        advance(len(block))
    if crc == span.crc32:
        return None
    where = f"{span.what} ({span.length} bytes from byte {span.offset})"
    return f"{path}: the CRC of {where} differs from the committed CRC"
