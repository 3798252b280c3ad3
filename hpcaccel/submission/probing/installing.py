"""An environment with hpcaccel, made where the cluster's nodes see it: a venv, pinned, its versions written beside it.

``<directory>/env-<version>-<time>`` is the environment, ``<directory>/env`` points to the newest. An older one stays as
it is: jobs that wait or run may use it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hpcaccel
from hpcaccel.errors import ClusterError
from hpcaccel.spec import ClusterProfile
from hpcaccel.submission.probing.pip_progress import PipOutput, Tell, is_progress
from hpcaccel.submission.probing.sending import archive
from hpcaccel.submission.remote.program_session import Drain

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
new=$([ -d "$directory" ] || echo yes)
mkdir -p "$directory"
directory=$(CDPATH= cd -- "$directory" && pwd)
target=$directory/env-$stamp
mkdir "$target" || refuse "another one is being built in $target"
leave() {
  trap '' HUP INT TERM
  [ "$done" = yes ] || { rm -rf "$target"; rm -f "$directory/.env.$$"; [ -z "$new" ] || rmdir "$directory"; }
}
done=no
trap leave EXIT
trap 'exit 130' HUP INT TERM
"$python" -m venv --without-pip "$target" >&2
"$target/bin/python" -m ensurepip --upgrade --default-pip >&2  # venv itself would hide what goes wrong here
mkdir "$target/source"
tar -xf - -C "$target/source"
for wheel in "$target"/source/*.whl; do :; done
bar=off
"$target/bin/python" -c 'import sys, pip; sys.exit([int(n) for n in pip.__version__.split(".")[:2]] < [24, 1])' &&
  bar=raw  # as text, which older ones do not have
export PYTHONUNBUFFERED=1
"$target/bin/python" -m pip install --progress-bar $bar --disable-pip-version-check --no-input \
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
    tell: Tell = lambda doing, percent: None,
) -> Installed:
    """Build the environment where the profile's cluster is, and make it the one that is used.

    What fails, or is interrupted, leaves nothing behind, and the environment before it in use.

    Args:
        tell: hears what pip does, as it goes on, from another thread.

    Raises:
        UserError: no such wheel, or none can be made of what runs here.
        ClusterError: no Python that will do, no room, a package that cannot be had; pip's own words are in the message.
    """
    sent = archive(wheel)
    stamp = f"{hpcaccel.__version__}-{time.strftime('%Y%m%d-%H%M%S')}"
    group = f"[{','.join(extras)}]" if extras else ""
    command = ["sh", "-c", SCRIPT, "sh", python, directory, stamp, group, *packages]
    code, out, err = _run(profile, command, sent, PipOutput(tell).hear)
    if code != 0:
        where = profile.host or "this machine"
        raise ClusterError(f"nothing was installed on {where}: {_reason(err, directory)}")
    version, base, target = out.strip().split("\n")[-3:]
    return Installed(version, f"{base}/env/bin/hpcaccel", f"{base}/env", f"{target}/hpcaccel-lock.txt")


def _run(
    profile: ClusterProfile, command: list[str], data: bytes, hear: Callable[[bytes], None]
) -> tuple[int, str, str]:
    if profile.host is None:
        return _run_here(command, data, hear)
    from hpcaccel.submission.remote import RemoteCluster

    with RemoteCluster(profile) as cluster:
        answer = cluster.run(command, stdin=data, hear=hear)
    return answer.code, answer.stdout, answer.stderr


def _run_here(command: list[str], data: bytes, hear: Callable[[bytes], None]) -> tuple[int, str, str]:
    """Ctrl-C ends pip, and lets the script take away what it has begun."""
    reading, writing = os.pipe()
    pipe = subprocess.PIPE
    with (
        os.fdopen(reading, "rb", buffering=0) as stderr,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=writing, start_new_session=True) as child,
    ):
        os.close(writing)
        errors = Drain(stderr.read, hear)
        try:
            out, _ = child.communicate(data)
        except BaseException:
            os.killpg(child.pid, signal.SIGTERM)
            child.communicate()
            raise
        finally:
            errors.all()
    return child.returncode, out.decode(errors="replace"), errors.all().decode(errors="replace")


_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded")
_NO_ANSWER = re.compile(r"Retrying .*? after connection broken by (?P<why>.*)")
_CAUSE = re.compile(r"\[Errno -?\d+\] [\w ]+|certificate verify failed[^)'\"]*|[\w ()=.]*timed out[\w ()=.]*")


def _reason(text: str, directory: str) -> str:
    """What went wrong, in one sentence; pip buries the first cause under what follows from it."""
    if _NO_ROOM.search(text):
        return (
            f"there is no room left in {directory}, or where temporary files go (TMPDIR). Make room, or choose another "
            "place by --dir"
        )
    if (match := _NO_ANSWER.search(text)) is not None:
        cause = _CAUSE.search(match["why"])
        words = (cause[0] if cause else match["why"][:200]).strip()
        return (
            f"the package index does not answer pip there ({words}). Where a site has an index of its own, set "
            "PIP_INDEX_URL or pip's configuration there"
        )
    said = [line.strip() for line in text.split("\n") if line.strip() and not is_progress(line)]
    lines = [re.sub(r" \(from versions: [^)]*\)", "", line) for line in said]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " ".join((errors or lines)[-3:])[:600] or "no reason was given"
