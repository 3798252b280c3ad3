"""What is sent to be installed: a wheel of the hpcaccel that runs here, and the versions that its requirements have."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

import hpcaccel
from hpcaccel.errors import UserError

__all__ = ["archive", "pins"]

_OF_THIS_MACHINE = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
"""What an installer adds to a wheel's own files."""


def archive(wheel: Path | None) -> bytes:
    """A tar file with the wheel, ours without one, and ``constraints.txt``.

    Raises:
        UserError: it is no wheel of hpcaccel, or none can be made of what runs here.
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
        raise UserError(f"there is no wheel {wheel}")
    if not (wheel.name.startswith("hpcaccel-") and wheel.suffix == ".whl" and zipfile.is_zipfile(wheel)):
        raise UserError(f"{wheel} is no wheel of hpcaccel: its name is hpcaccel-<version>-py3-none-any.whl")
    return wheel


def _own(folder: Path) -> Path:
    """Of a checkout built; of an installed package put together again, so that it is this very one."""
    root = Path(hpcaccel.__file__).parents[1]
    return _built(root, folder) if (root / "pyproject.toml").is_file() else _repacked(folder)


def _built(root: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if importlib.util.find_spec("hatchling") is not None:
        command.append("--no-build-isolation")  # nothing has to be fetched
    command += ["--wheel-dir", str(folder), str(root)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("hpcaccel-*.whl"))
    if result.returncode != 0 or not wheels:
        words = " ".join(result.stderr.split("\n")[-3:]).strip() or "pip gave no reason"
        raise UserError(
            f"no wheel could be made of {root}: {words}. Make one with `python -m build`, and name it by --wheel"
        )
    return wheels[0]


def _repacked(folder: Path) -> Path:
    try:
        package = metadata.distribution("hpcaccel")
    except metadata.PackageNotFoundError:
        raise UserError("the hpcaccel that runs here was not installed from a wheel: name one by --wheel") from None
    files = [one for one in package.files or [] if _belongs(one)]
    if not any(one.name == "METADATA" for one in files):
        raise UserError("what hpcaccel was installed from is not written down here: name a wheel by --wheel")
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
    """Not the programs beside it, nor what Python and the installer have made."""
    inside = one.parts[0] == "hpcaccel" or one.parts[0].endswith(".dist-info")
    return inside and "__pycache__" not in one.parts and one.name not in _OF_THIS_MACHINE


def pins() -> str:
    """The versions that hpcaccel's own requirements have here, and theirs, a line each."""
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
    """Names of what a package needs, its extras aside."""
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
    return None if "+" in version else version  # a local build is in no index
