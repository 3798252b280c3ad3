"""Files sent to and fetched from this login node: code archives, and the results of runs.

``<runs_dir>/.code/<hash>/`` contains the unpacked files of an archive, and ``<hash>.json`` lists them. The list is
written last: the folder is complete once the list exists. To fetch results, another machine first gets a list of
files and then requests the missing ones.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from hpcaccel import checkpoint_files
from hpcaccel.core.durable_files import DIRECTORY_MODE, lock_file, read_json, write_json
from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import CheckpointError, RunDirectoryError, UserError
from hpcaccel.submission.code.code_copy import SENT_CODE
from hpcaccel.submission.jobs.run_state import read_record
from hpcaccel.submission.remote.protocol import FrameWriter
from hpcaccel.submission.runs.find import find_run

__all__ = ["best_of", "code_folder", "receive", "serve"]


CHUNK_BYTES = 1 << 18


def code_folder(runs_dir: Path) -> Path:
    """The folder for code from other machines. Raises RunDirectoryError if it cannot be created."""
    folder = runs_dir / SENT_CODE
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot create {folder} on the cluster: {error.strerror}. Set runs_dir in the profile to another directory"
        ) from None
    return folder


def receive(request: dict[str, Any], runs_dir: Path, stream: BinaryIO, frames: FrameWriter) -> None:
    """Receive a code archive, continuing an interrupted transfer.

    The first frame of the reply (``have``) contains the number of bytes received so far, or the path of the files if
    the archive is complete. The remaining bytes are read from ``stream``; then a second ``have`` contains the path.

    Raises:
        RunDirectoryError: the folder cannot be created, the disk is full, or the archive or its hash is not valid.
    """
    folder, name, size = code_folder(runs_dir), str(request["hash"]), int(request["size"])
    if len(name) != 64 or set(name) - set("0123456789abcdef"):
        raise RunDirectoryError(f"{name!r} is not a SHA-256 hash")
    part = folder / f".{name}.{size}.part"
    with part.open("ab") as file:
        lock_file(file)  # concurrent transfers of the same code wait for the first
        if read_json(folder / f"{name}.json") is not None:
            part.unlink(missing_ok=True)
            frames.send("have", complete=True, path=str(folder / name))
            return
        have = min(part.stat().st_size, size)
        frames.send("have", complete=False, offset=have)
        try:
            if not _take(stream, file, size - have):
                return  # the connection broke; the next connection continues here
            _unpack(part, folder / name)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                part.unlink(missing_ok=True)
                raise RunDirectoryError(
                    f"the disk is full on the cluster: {folder}: {error.strerror}. Nothing was submitted. Delete old "
                    "runs and checkpoints there, or set runs_dir in the profile to another disk"
                ) from None
            raise
        part.unlink()
    frames.send("have", complete=True, path=str(folder / name))


def _take(stream: BinaryIO, file: BinaryIO, count: int) -> bool:
    while count:
        piece = stream.read1(min(count, CHUNK_BYTES))  # type: ignore[attr-defined]
        if not piece:
            return False
        file.write(piece)
        file.flush()
        count -= len(piece)
    os.fsync(file.fileno())
    return True


def _unpack(part: Path, target: Path) -> None:
    place = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=DIRECTORY_MODE)
    files: list[str] = []
    try:
        with gzip.open(part) as plain:
            digest = hashlib.file_digest(plain, "sha256") if hasattr(hashlib, "file_digest") else _digest(plain)
            if digest.hexdigest() != target.name:
                raise RunDirectoryError("the code archive was corrupted during transfer (wrong SHA-256). Submit again")
        with tarfile.open(part, "r:gz") as archive:
            for member in archive:
                _put(archive, member, place)
                files.append(member.name)
        shutil.rmtree(target, ignore_errors=True)  # left by a try that ended before it wrote the list
        os.rename(place, target)
        write_json(target.with_suffix(".json"), {"files": files})
    except (EOFError, gzip.BadGzipFile, tarfile.TarError) as error:
        part.unlink(missing_ok=True)
        raise RunDirectoryError(f"the code archive was corrupted during transfer ({error}). Submit again") from None
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _digest(plain: Any) -> Any:
    digest = hashlib.sha256()
    while piece := plain.read(CHUNK_BYTES):
        digest.update(piece)
    return digest


def _put(archive: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise RunDirectoryError(f"the code archive contains {member.name!r}, a path outside the code directory")
    target = place / name
    target.parent.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    if member.issym():
        target.symlink_to(member.linkname)
        return
    source = archive.extractfile(member)
    assert source is not None, "archives contain only files and symbolic links"
    with source, target.open("xb") as file:
        shutil.copyfileobj(source, file)
    target.chmod(member.mode & 0o750)


USUAL = ("val_loss", "eval_loss", "valid_loss", "loss")
"""The default metrics, in order of preference."""


def best_of(run: RunDir, committed: Sequence[tuple[int, Path]], *, metric: str | None, largest: bool) -> Path:
    """The checkpoint with the smallest (or largest) ``metric``.

    The value of a checkpoint is the last value logged at or before its step.

    Raises:
        UserError: no value of the metric was logged at or before the step of any checkpoint.
    """
    values: dict[str, dict[int, float]] = {}
    for line in Logged(run).read():
        for name, value in line.values.items():
            values.setdefault(name, {})[line.step] = value  # for a repeated step, the last value counts
    chosen = metric or next((name for name in USUAL if name in values), None)
    logged = values.get(chosen or "", {})
    scores = {path: logged[max(before)] for step, path in committed if (before := [at for at in logged if at <= step])}
    if not scores:
        wanted = chosen or " or ".join(USUAL)
        raise UserError(
            f"run {run.run_id} has no best checkpoint: no value of {wanted} was logged at or before the step of any "
            f"checkpoint (logged metrics: {', '.join(sorted(values)) or 'none'}). Pass a metric with --metric, or a "
            "step with --checkpoint"
        )
    return (max if largest else min)(scores, key=lambda path: scores[path])


READ_BYTES = 1 << 20
_NOT_RESULTS = {"code", "node.pyz", "submitit", "control", "lease.json", "checkpoints"}
"""Inputs and internal files of a run, and outputs that are sent only on request because of their size."""


def serve(request: dict[str, Any], frames: FrameWriter) -> None:
    """Reply with the list of a run's files, or with the contents of the ``files`` that the request lists.

    Raises:
        RunNotFound, CheckpointError: this cluster does not have the run or the checkpoint.
        UserError: no value of the metric was logged for any checkpoint, or a file name is not valid.
    """
    run = find_run(request["run"]).dir
    if "files" in request:
        for name, offset, size in request["files"]:
            _send(_inside(run, name), name, int(offset), int(size), frames)
        return
    chosen = None if request["checkpoint"] is None else _checkpoint(run, request["checkpoint"], request)
    record = read_record(run)
    frames.send("run", run_id=run.run_id, name=record.name, checkpoint=None if chosen is None else chosen.name)
    for path in _results(run.path, chosen):
        known = path.lstat()
        target = os.readlink(path) if path.is_symlink() else None
        name = path.relative_to(run.path).as_posix()
        frames.send("file", name=name, size=known.st_size, mtime_ns=known.st_mtime_ns, link=target)


def _results(folder: Path, checkpoint: Path | None) -> Iterator[Path]:
    yield from _below(folder, leave_out=_NOT_RESULTS)
    if checkpoint is not None:
        yield from _below(checkpoint, leave_out=set())


def _below(folder: Path, *, leave_out: set[str]) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        if entry.name in leave_out or entry.name.endswith(".tmp"):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _below(path, leave_out=leave_out)
        elif entry.is_file(follow_symlinks=False) or (
            entry.is_symlink() and not os.path.isabs(os.readlink(path)) and entry.is_file()
        ):
            yield path


def _checkpoint(run: RunDir, which: str, request: dict[str, Any]) -> Path:
    """The checkpoint that ``which`` selects: ``best``, ``last`` or a step."""
    found = checkpoint_files.step_directories(run.checkpoints)
    committed = [(step, path) for step, path in found if (path / checkpoint_files.MANIFEST).exists()]
    if not committed:
        raise CheckpointError(f"run {run.run_id} has no checkpoint yet")
    steps = ", ".join(str(step) for step, _ in sorted(committed))
    if which in ("last", "latest"):
        return max(committed)[1]
    if which == "best":
        return best_of(run, committed, metric=request.get("metric"), largest=bool(request.get("largest")))
    for step, path in committed:
        if which == str(step):
            return path
    raise CheckpointError(
        f"run {run.run_id} has no checkpoint {which!r} (steps: {steps}). Pass a step, 'best' or 'last'"
    )


def _inside(run: RunDir, name: str) -> Path:
    path = run.path / name
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise UserError(f"{name!r} is not a file of run {run.run_id}")
    return path


def _send(path: Path, name: str, offset: int, size: int, frames: FrameWriter) -> None:
    """Send a file from ``offset`` up to ``size``. The last frame has the CRC-32 of the file from byte 0 on."""
    crc = 0
    with path.open("rb") as file:
        position = 0
        while position < size:
            piece = file.read(min(READ_BYTES, (offset if position < offset else size) - position))
            if not piece:
                break  # truncated in the meantime; the last frame has the actual size
            crc = zlib.crc32(piece, crc)
            position += len(piece)
            if position > offset:
                frames.send("data", piece, name=name)
    frames.send("end", name=name, crc=crc, size=position)
