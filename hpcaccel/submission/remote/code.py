"""This side: the code that a job runs, as an archive whose hash is that of its contents, and sending it."""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from hpcaccel.submission.code_copy import CodePlan, copy_code
from hpcaccel.submission.remote.program_session import ConnectionLost

if TYPE_CHECKING:
    from rich.progress import Progress

    from hpcaccel.submission.remote.remote_cluster import Conversation, RemoteCluster

__all__ = ["Archive", "archived", "progress", "send"]

CHUNK_BYTES = 1 << 17
_MTIME = 315_532_800
"""1980: the same files make the same archive, whenever they were checked out."""


@dataclass(frozen=True)
class Archive:
    file: BinaryIO
    hash: str
    """SHA-256 of the archive before it is compressed."""
    size: int


@contextmanager
def archived(plan: CodePlan) -> Iterator[Archive]:
    """The planned files, packed; gone with the block.

    Raises:
        RunDirectoryError: a file cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="hpcaccel-code-") as folder, tempfile.TemporaryFile() as file:
        copy = Path(folder) / "code"
        copy_code(plan, copy)
        plain = Path(folder) / "code.tar"
        _pack(copy, plain)
        with plain.open("rb") as source:
            digest = hashlib.sha256()
            with gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0, compresslevel=6) as packed:
                while piece := source.read(CHUNK_BYTES):
                    digest.update(piece)
                    packed.write(piece)
        yield Archive(file, digest.hexdigest(), file.tell())


def _pack(copy: Path, target: Path) -> None:
    found = sorted(path for path in copy.rglob("*") if path.is_symlink() or path.is_file())
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in found:
            if path.is_symlink() and os.path.isabs(os.readlink(path)):
                continue  # a folder of this machine's, which the cluster does not have
            member = archive.gettarinfo(path, path.relative_to(copy).as_posix())
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = _MTIME
            member.type = tarfile.SYMTYPE if path.is_symlink() else tarfile.REGTYPE
            member.mode = 0o750 if member.mode & 0o100 else 0o640
            if path.is_symlink():
                archive.addfile(member)
                continue
            member.linkname, member.size = "", path.stat().st_size
            with path.open("rb") as source:
                archive.addfile(member, source)


def send(cluster: RemoteCluster, archive: Archive, *, runs_dir: str | None = None) -> str:
    """Bring an archive to the cluster, unless it is there already; a connection that breaks costs what was on its way.

    Args:
        runs_dir: in place of the profile's.

    Returns:
        Where its files lie there.

    Raises as everything that asks the cluster, and RunDirectoryError when its disk is full.
    """
    request = {"do": "receive", "hash": archive.hash, "size": archive.size, **cluster.introduction(runs_dir)}
    with progress() as shown:
        bar = shown.add_task(f"code to {cluster.name}", total=archive.size)

        def talk(conversation: Conversation) -> str:
            head, _ = conversation.expect("have")
            if not head["complete"]:
                with suppress(ConnectionLost):  # it may have left, and said why before
                    _feed(conversation, archive, int(head["offset"]), lambda done: shown.update(bar, completed=done))
                head, _ = conversation.expect("have")
                assert head["complete"]
            shown.update(bar, completed=archive.size)
            return str(head["path"])

        return str(cluster.again(lambda: cluster.converse(request, talk)))


def _feed(conversation: Conversation, archive: Archive, offset: int, tell: Any) -> None:
    archive.file.seek(offset)
    tell(offset)
    while piece := archive.file.read(CHUNK_BYTES):
        conversation.send(piece)
        offset += len(piece)
        tell(offset)
    conversation.end_input()


def progress() -> Progress:
    """A bar with rate and time left, on stderr; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
