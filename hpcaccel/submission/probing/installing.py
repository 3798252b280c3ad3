"""An environment with hpcaccel, made where the cluster's nodes see it: a venv, pinned, its versions written beside it.

``<directory>/env-<version>-<time>`` is the environment, ``<directory>/env`` points to the newest. An older one stays as
it is: jobs that wait or run may use it.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import hpcaccel
from hpcaccel.errors import ClusterError, UserError
from hpcaccel.spec import ClusterProfile

__all__ = ["DEFAULT_DIRECTORY", "Installed", "install_hpcaccel"]

DEFAULT_DIRECTORY = "~/.local/share/hpcaccel"
"""Commands over SSH look for hpcaccel here when a profile names no other place."""

SCRIPT = r"""
set -eu
umask 027
python=$1 directory=$2 stamp=$3 extras=$4
shift 4
case $directory in "~/"*) directory=$HOME/${directory#??};; esac
refuse() { echo "$1" >&2; exit 3; }
command -v "$python" >/dev/null 2>&1 || refuse "there is no $python there: load a module, or name one by --python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  refuse "$("$python" --version 2>&1) there is too old: hpcaccel needs 3.10 or newer; name another by --python"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  refuse "$python there has no venv (Debian: apt install python3-venv): name another by --python"
[ ! -e "$directory/env" ] || [ -L "$directory/env" ] ||
  refuse "$directory/env is there and was not made by this command: choose another place by --dir"
mkdir -p "$directory"
directory=$(CDPATH= cd -- "$directory" && pwd)
target=$directory/env-$stamp
done=no
trap '[ $done = yes ] || rm -rf "$target"' EXIT
"$python" -m venv "$target" >&2
mkdir "$target/source"
tar -xf - -C "$target/source"
for wheel in "$target"/source/*.whl; do :; done
"$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
  --constraint "$target/source/constraints.txt" "$wheel$extras" "$@" >&2
{ echo "# What is in $target, made by hpcaccel cluster install"
  "$target/bin/python" -m pip freeze --all --disable-pip-version-check; } > "$target/hpcaccel-lock.txt"
version=$("$target/bin/hpcaccel" --version)
ln -s "env-$stamp" "$directory/.env.$$"
mv -fT "$directory/.env.$$" "$directory/env"
done=yes
echo "$version"
echo "$directory"
echo "$target"
"""


@dataclass(frozen=True)
class Installed:
    version: str
    """What the new program says of itself: ``hpcaccel 0.1.0``."""
    program: str
    environment: str
    """The path that goes on to be right when a newer one is installed."""
    lock: str


def install_hpcaccel(
    profile: ClusterProfile,
    *,
    directory: str = DEFAULT_DIRECTORY,
    python: str = "python3",
    wheel: Path | None = None,
    extras: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> Installed:
    """Build the environment where the profile's cluster is, and make it the one that is used.

    What fails leaves nothing behind, and the environment before it in use.

    Raises:
        UserError: no such wheel, or none can be built.
        ClusterError: no Python that will do, no room, a package that cannot be had; pip's own words are in the message.
    """
    with tempfile.TemporaryDirectory(prefix="hpcaccel-wheel-") as folder:
        found = wheel if wheel is not None else _built(Path(folder))
        if not found.is_file():
            raise UserError(f"there is no wheel {found}")
        sent = _archive(found, _pins())
    stamp = f"{hpcaccel.__version__}-{time.strftime('%Y%m%d-%H%M%S')}"
    group = f"[{','.join(extras)}]" if extras else ""
    code, out, err = _run(profile, ["sh", "-c", SCRIPT, "sh", python, directory, stamp, group, *packages], sent)
    if code != 0:
        raise ClusterError(f"nothing was installed on {profile.host or 'this machine'}: {_last_words(err)}")
    version, base, target = out.strip().split("\n")[-3:]
    return Installed(version, f"{base}/env/bin/hpcaccel", f"{base}/env", f"{target}/hpcaccel-lock.txt")


def _run(profile: ClusterProfile, command: list[str], data: bytes) -> tuple[int, str, str]:
    if profile.host is None:
        result = subprocess.run(command, input=data, capture_output=True, check=False)
        return result.returncode, result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")
    from hpcaccel.submission.remote import RemoteCluster

    with RemoteCluster(profile) as cluster:
        answer = cluster.run(command, stdin=data)
    return answer.code, answer.stdout, answer.stderr


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " ".join((errors or lines)[-3:])[:600] or "no reason was given"


def _built(folder: Path) -> Path:
    """A wheel of what runs here: of the checkout, or of this version from the package index."""
    root = Path(hpcaccel.__file__).parents[1]
    source = str(root) if (root / "pyproject.toml").is_file() else f"hpcaccel=={hpcaccel.__version__}"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run([*command, "--wheel-dir", str(folder), source], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("hpcaccel-*.whl"))
    if result.returncode != 0 or not wheels:
        raise UserError(f"no wheel could be made of {source}: {_last_words(result.stderr)} Name one by --wheel")
    return wheels[0]


def _pins() -> str:
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


def _archive(wheel: Path, pins: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(wheel, wheel.name)
        data = pins.encode()
        entry = tarfile.TarInfo("constraints.txt")
        entry.size, entry.mode = len(data), 0o640
        archive.addfile(entry, io.BytesIO(data))
    return stream.getvalue()
