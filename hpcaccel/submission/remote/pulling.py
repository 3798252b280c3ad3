"""Fetching results from a cluster, file by file. Complete files are skipped; a partial file is continued."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hpcaccel.checkpoint_files import MANIFEST
from hpcaccel.core.durable_files import DIRECTORY_MODE, FILE_MODE
from hpcaccel.errors import ClusterError, RunDirectoryError
from hpcaccel.submission.remote.archives import progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccel.submission.remote.remote_cluster import RemoteCluster, RemoteRequest

__all__ = ["Pulled", "pull"]

PART = ".hpcaccel-part"
"""Suffix of an incomplete file."""
_TRIES = 3
"""Maximum number of times that a file is fetched if its checksum is wrong: the run may still be writing to it."""


@dataclass(frozen=True, kw_only=True)
class Pulled:
    path: Path
    files: int
    """Files that were fetched."""
    bytes: int
    unchanged: int
    """Files that were already here."""
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
    """Fetch a run's logs, metrics and records, and optionally a checkpoint.

    Args:
        folder: the destination. If None, it is ``<runs_dir>/<name>/<run id>``, as for a run of this machine.
        checkpoint: a step, ``last``, or ``best`` (the smallest ``metric``; the largest if ``largest``).

    Raises:
        ClusterError: a request to the cluster failed, or the cluster has no such run or checkpoint.
        RunDirectoryError: the files cannot be written here.
    """
    request = {"do": "pull", "run": run, "checkpoint": checkpoint, "metric": metric, "largest": largest}
    head, files = cluster.again(lambda: cluster.converse(request, _read_list))
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


def _read_list(conversation: RemoteRequest) -> tuple[dict[str, Any], list[_File]]:
    about, _ = conversation.expect("run")
    for key, label in (("name", "name"), ("run_id", "run ID")):
        if about[key] in ("", ".", "..") or "/" in about[key] or "\0" in about[key]:
            raise ClusterError(
                f"the cluster sent {about[key]!r} as the run's {label}, which is not a valid directory name"
            )
    files: list[_File] = []
    while True:
        head, _ = conversation.frame()
        if head["frame"] == "exit":
            return about, files
        if head["frame"] == "file":
            name = PurePosixPath(head["name"])
            if name.is_absolute() or ".." in name.parts or ".." in PurePosixPath(head["link"] or "").parts[1:]:
                raise ClusterError(f"the cluster listed {head['name']!r}, a path outside the run directory")
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
    wrong: dict[str, int] = {}
    with progress() as shown:
        bar = shown.add_task(f"fetching {run_id} from {cluster.name}", total=sum(file.size for file in files))

        def advance(count: int) -> None:
            shown.advance(bar, count)

        # A checkpoint counts as complete once it has its manifest, even here after an interrupted pull: manifests last.
        for are_manifests in (False, True):
            left = {one.name: one for one in files if (PurePosixPath(one.name).name == MANIFEST) is are_manifests}
            once = partial(_fetch, cluster, run_id, target, left, advance, wrong)
            while left:
                cluster.again(once)
                if bad := [name for name, times in wrong.items() if times >= _TRIES]:
                    raise ClusterError(f"{bad[0]} arrived with a wrong checksum {_TRIES} times. Pull again")


def _fetch(
    cluster: RemoteCluster,
    run_id: str,
    target: Path,
    left: dict[str, _File],
    advance: Callable[[int], None],
    wrong: dict[str, int],
) -> None:
    """Request all files in ``left``, and remove each completed file from ``left``."""
    requested = [(name, _have(target / name, file), file.size) for name, file in left.items()]
    request = {"do": "pull", "run": run_id, "files": requested}

    def read_files(conversation: RemoteRequest) -> None:
        while True:
            head, payload = conversation.frame()
            if head["frame"] == "exit":
                return
            if head["frame"] in ("data", "end") and head["name"] not in left:
                raise ClusterError(f"the cluster sent {head['name']!r}, which was not requested")
            if head["frame"] == "data":
                with _part(target / head["name"]).open("ab") as part:
                    part.write(payload)
                advance(len(payload))
            elif head["frame"] == "end":
                if _complete(target / head["name"], left[head["name"]], head["crc"], head["size"]):
                    del left[head["name"]]
                else:
                    wrong[head["name"]] = wrong.get(head["name"], 0) + 1
            elif head["frame"] == "err":
                raise ClusterError(payload.decode("utf-8", "replace").strip().removeprefix("error: "))

    cluster.converse(request, read_files)


def _part(path: Path) -> Path:
    return path.with_name(path.name + PART)


def _have(path: Path, file: _File) -> int:
    """The size in bytes of the partial file, which is created if missing and emptied if too large."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    part = _part(path)
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT, FILE_MODE))
    size = part.stat().st_size
    if size > file.size:
        os.truncate(part, 0)
        return 0
    return size


def _complete(path: Path, file: _File, crc: int, size: int) -> bool:
    """Rename a complete file if its checksum is correct; else delete it, so that it is fetched again."""
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
