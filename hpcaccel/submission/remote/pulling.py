"""This side: results from a cluster, file by file. What is here is not fetched again, and half a file goes on."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hpcaccel.core.run_dir import DIRECTORY_MODE, FILE_MODE
from hpcaccel.errors import ClusterError, RunDirectoryError
from hpcaccel.submission.remote.code import progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccel.submission.remote.remote_cluster import Conversation, RemoteCluster

__all__ = ["Pulled", "pull"]

PART = ".hpcaccel-part"
"""Behind the name of a file that is not complete."""
_TRIES = 3
"""For a file whose sum is wrong, which one that is being written to may have."""


@dataclass(frozen=True, kw_only=True)
class Pulled:
    path: Path
    files: int
    """That came now."""
    bytes: int
    unchanged: int
    """Files that were here."""
    checkpoint: str | None


@dataclass(frozen=True, kw_only=True)
class _File:
    name: str
    size: int
    mtime_ns: int
    link: str | None


def pull(
    cluster: RemoteCluster,
    run: str,
    folder: Path | None,
    *,
    runs_dir: Path,
    checkpoint: str | None = None,
    metric: str | None = None,
    largest: bool = False,
) -> Pulled:
    """Fetch a run's logs, metrics and records, and one checkpoint where ``checkpoint`` names one.

    Args:
        folder: where to; None: ``<runs_dir>/<name>/<run id>``, as if it had run here.
        checkpoint: a step, ``last`` or ``best`` (by ``metric``, the smallest value or the largest).

    Raises:
        RunNotFound, CheckpointError and what asking the cluster raises; RunDirectoryError: it cannot be written here.
    """
    wish = {"do": "pull", "run": run, "checkpoint": checkpoint, "metric": metric, "largest": largest}
    head, files = cluster.again(lambda: cluster.converse(wish, _hear_list))
    target = folder or runs_dir / head["name"] / head["run_id"]
    try:
        target.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
        missing = [file for file in files if not _is_here(target, file)]
        _fetch_all(cluster, head["run_id"], target, [file for file in missing if file.link is None])
        for file in missing:
            if file.link is not None:
                _link(target, file)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {error.filename or target}: {error.strerror}") from None
    return Pulled(
        path=target,
        files=len(missing),
        bytes=sum(file.size for file in missing),
        unchanged=len(files) - len(missing),
        checkpoint=head["checkpoint"],
    )


def _hear_list(conversation: Conversation) -> tuple[dict[str, Any], list[_File]]:
    about, _ = conversation.expect("run")
    for key in ("name", "run_id"):
        if about[key] in ("", ".", "..") or "/" in about[key] or "\0" in about[key]:
            raise ClusterError(f"the cluster offers a run whose {key} is {about[key]!r}: that is no folder's name")
    files: list[_File] = []
    while True:
        head, _ = conversation.frame()
        if head["frame"] == "exit":
            return about, files
        if head["frame"] == "file":
            name = PurePosixPath(head["name"])
            if name.is_absolute() or ".." in name.parts or ".." in PurePosixPath(head["link"] or "").parts[1:]:
                raise ClusterError(f"the cluster offers a file {head['name']!r} outside of the run")
            files.append(_File(**{key: head[key] for key in ("name", "size", "mtime_ns", "link")}))


def _is_here(target: Path, file: _File) -> bool:
    path = target / file.name
    if file.link is not None:
        return path.is_symlink() and os.readlink(path) == file.link
    try:
        known = path.stat()
    except FileNotFoundError:
        return False
    return known.st_size == file.size and known.st_mtime_ns == file.mtime_ns


def _link(target: Path, file: _File) -> None:
    path = target / file.name
    path.parent.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    path.unlink(missing_ok=True)
    assert file.link is not None
    if path.parent.joinpath(file.link).resolve().is_relative_to(target.resolve()):
        path.symlink_to(file.link)


def _fetch_all(cluster: RemoteCluster, run_id: str, target: Path, files: list[_File]) -> None:
    left = {file.name: file for file in files}
    wrong: dict[str, int] = {}
    with progress() as shown:
        bar = shown.add_task(f"{run_id} from {cluster.name}", total=sum(file.size for file in files))

        def tell(count: int) -> None:
            shown.advance(bar, count)

        def once() -> None:
            _fetch(cluster, run_id, target, left, tell, wrong)

        while left:
            cluster.again(once)
            if bad := [name for name, times in wrong.items() if times >= _TRIES]:
                raise ClusterError(f"{bad[0]} did not arrive as it was sent, {_TRIES} times. Pull once more")


def _fetch(
    cluster: RemoteCluster,
    run_id: str,
    target: Path,
    left: dict[str, _File],
    tell: Callable[[int], None],
    wrong: dict[str, int],
) -> None:
    """Ask for all that is ``left``, and take out what came."""
    asked = [(name, _have(target / name, file), file.size) for name, file in left.items()]
    request = {"do": "pull", "run": run_id, "files": asked}

    def talk(conversation: Conversation) -> None:
        while True:
            head, payload = conversation.frame()
            if head["frame"] == "exit":
                return
            if head["frame"] in ("data", "end") and head["name"] not in left:
                raise ClusterError(f"the cluster sends a file {head['name']!r} that it was not asked for")
            if head["frame"] == "data":
                with _part(target / head["name"]).open("ab") as part:
                    part.write(payload)
                tell(len(payload))
            elif head["frame"] == "end":
                if _complete(target / head["name"], left[head["name"]], head["crc"], head["size"]):
                    del left[head["name"]]
                else:
                    wrong[head["name"]] = wrong.get(head["name"], 0) + 1
            elif head["frame"] == "err":
                raise ClusterError(payload.decode("utf-8", "replace").strip().removeprefix("error: "))

    cluster.converse(request, talk)


def _part(path: Path) -> Path:
    return path.with_name(path.name + PART)


def _have(path: Path, file: _File) -> int:
    """How much of a file came earlier; makes it where there is nothing."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    part = _part(path)
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT, FILE_MODE))
    size = part.stat().st_size
    if size > file.size:
        os.truncate(part, 0)
        return 0
    return size


def _complete(path: Path, file: _File, crc: int, size: int) -> bool:
    """Give a file its name, when its sum is right; else begin it anew."""
    part = _part(path)
    if part.stat().st_size != size or _sum(part) != crc:
        part.unlink()
        return False
    with part.open("rb") as whole:
        os.fsync(whole.fileno())
    os.utime(part, ns=(file.mtime_ns, file.mtime_ns))
    os.replace(part, path)
    return True


def _sum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            crc = zlib.crc32(piece, crc)
    return crc
