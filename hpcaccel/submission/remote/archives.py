"""Archives for a login node: a job's code, and an hpcaccel wheel with its pinned requirements.

A code archive is identified by the hash of its contents.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import hpcaccel
from hpcaccel.errors import UserError
from hpcaccel.submission.code.code_copy import CodePlan, copy_code
from hpcaccel.submission.remote.protocol import ConnectionLost

if TYPE_CHECKING:
    from rich.progress import Progress

    from hpcaccel.submission.remote.remote_cluster import RemoteCluster, RemoteRequest

__all__ = ["Archive", "archive", "archived", "pins", "progress", "send"]


CHUNK_BYTES = 1 << 17
_MTIME = 315_532_800
"""Modification time of all files in an archive (1980), so that the same files always give the same archive."""


@dataclass(frozen=True)
class Archive:
    file: BinaryIO
    hash: str
    """SHA-256 of the uncompressed archive."""
    size: int


@contextmanager
def archived(plan: CodePlan) -> Iterator[Archive]:
    """Pack the planned files into an archive, which is deleted after the block.

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
                continue  # a link to a folder of this machine, which the cluster does not have
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
    """Send an archive to the cluster unless it is already there. A broken transfer is continued.

    Args:
        runs_dir: replaces the ``runs_dir`` of the profile.

    Returns:
        The directory on the cluster that contains the files.

    Raises the errors of ``RemoteCluster.again``, and ClusterError if the cluster's disk is full.
    """
    request = {"do": "receive", "hash": archive.hash, "size": archive.size, **cluster.introduction(runs_dir)}
    with progress() as shown:
        bar = shown.add_task(f"sending code to {cluster.name}", total=archive.size)

        def talk(conversation: RemoteRequest) -> str:
            head, _ = conversation.expect("have")
            if not head["complete"]:
                with suppress(ConnectionLost):  # the login node may have ended the request and sent an error first
                    _feed(conversation, archive, int(head["offset"]), lambda done: shown.update(bar, completed=done))
                head, _ = conversation.expect("have")
                assert head["complete"]
            shown.update(bar, completed=archive.size)
            return str(head["path"])

        return str(cluster.again(lambda: cluster.converse(request, talk)))


def _feed(conversation: RemoteRequest, archive: Archive, offset: int, show_progress: Any) -> None:
    archive.file.seek(offset)
    show_progress(offset)
    while piece := archive.file.read(CHUNK_BYTES):
        conversation.send(piece)
        offset += len(piece)
        show_progress(offset)
    conversation.end_input()


def progress() -> Progress:
    """A progress bar on stderr with rate and remaining time; no output if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip


_INSTALLER_FILES = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
"""Files that an installer adds to the files of a wheel, or replaces."""


def archive(wheel: Path | None) -> bytes:
    """The bytes of a tar file with ``constraints.txt`` and ``wheel`` (or, if None, a wheel of the running hpcaccel).

    Raises:
        UserError: ``wheel`` is not an hpcaccel wheel, or none can be built from the running hpcaccel.
    """
    with tempfile.TemporaryDirectory(prefix="hpcaccel-wheel-") as folder:
        found = _own(Path(folder)) if wheel is None else _checked(wheel)
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as packed:
            packed.add(found, found.name)
            data = pins().encode()
            entry = tarfile.TarInfo("constraints.txt")
            entry.size, entry.mode = len(data), 0o640
            packed.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def _checked(wheel: Path) -> Path:
    if not wheel.is_file():
        raise UserError(f"wheel {str(wheel)!r} does not exist")
    if not (wheel.name.startswith("hpcaccel-") and wheel.suffix == ".whl" and zipfile.is_zipfile(wheel)):
        raise UserError(f"{str(wheel)!r} is not an hpcaccel wheel: expected hpcaccel-<version>-py3-none-any.whl")
    return wheel


def _own(folder: Path) -> Path:
    """A wheel of the running hpcaccel: built from a checkout, or reassembled from the installed package."""
    root = Path(hpcaccel.__file__).parents[1]
    return _built(root, folder) if (root / "pyproject.toml").is_file() else _repacked(folder)


def _built(root: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if importlib.util.find_spec("hatchling") is not None:
        command.append("--no-build-isolation")  # do not download build dependencies
    command += ["--wheel-dir", str(folder), str(root)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("hpcaccel-*.whl"))
    if result.returncode != 0 or not wheels:
        detail = " ".join(result.stderr.split("\n")[-3:]).strip() or "pip printed no error"
        raise UserError(
            f"could not build a wheel from {root}: {detail}. Build one with `python -m build` and pass it with --wheel"
        )
    return wheels[0]


def _repacked(folder: Path) -> Path:
    try:
        package = metadata.distribution("hpcaccel")
    except metadata.PackageNotFoundError:
        raise UserError("the running hpcaccel was not installed from a wheel: pass one with --wheel") from None
    files = [one for one in package.files or [] if _belongs(one)]
    if not any(one.name == "METADATA" for one in files):
        raise UserError("the metadata of the installed hpcaccel does not list its files: pass a wheel with --wheel")
    path = folder / f"hpcaccel-{package.version}-py3-none-any.whl"
    record = f"hpcaccel-{package.version}.dist-info/RECORD"
    lines = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for one in files:
            data = Path(str(one.locate())).read_bytes()
            wheel.writestr(str(one), data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{one},sha256={digest},{len(data)}\n")
        wheel.writestr(record, "".join([*lines, f"{record},,\n"]))
    return path


def _belongs(one: metadata.PackagePath) -> bool:
    """Whether a file is part of the wheel, and was not created by Python or the installer."""
    inside = one.parts[0] == "hpcaccel" or one.parts[0].endswith(".dist-info")
    return inside and "__pycache__" not in one.parts and one.name not in _INSTALLER_FILES


def pins() -> str:
    """The installed versions of hpcaccel's direct and indirect requirements (``name==version``), one per line.

    Packages with a local version, such as ``2.6.0+cu124``, are left out.
    """
    pinned: dict[str, str] = {}
    waiting = ["hpcaccel"]
    while waiting:
        name = waiting.pop()
        for required in _requirements(name):
            if required not in pinned and (version := _version(required)) is not None:
                pinned[required] = version
                waiting.append(required)
    return "".join(f"{name}=={version}\n" for name, version in sorted(pinned.items()))


def _requirements(name: str) -> list[str]:
    """The names of a package's requirements, without extras."""
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    plain = (line.partition(";") for line in lines)
    heads = [head for head, _, marker in plain if "extra ==" not in marker]
    return ["".join(_name_characters(head)) for head in heads]


def _name_characters(text: str) -> str:
    end = next((index for index, letter in enumerate(text) if not (letter.isalnum() or letter in "._-")), len(text))
    return text[:end].lower()


def _version(name: str) -> str | None:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    return None if "+" in version else version  # public package indexes have no local versions
