"""Installing hpcaccel on a cluster, in a venv with pinned versions.

``<directory>/env-<version>-<time>`` is the environment, ``<directory>/env`` a link to the newest. Older environments
are kept, because queued and running jobs may use them.
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
from hpcaccel.submission.remote.archives import archive
from hpcaccel.submission.remote.protocol import Drain

__all__ = ["DEFAULT_DIRECTORY", "Installed", "PipOutput", "ProgressCallback", "install_hpcaccel", "is_progress"]


ProgressCallback = Callable[[str, int | None], None]
"""Called with pip's line about its current step, and with the completed percentage or None."""

_DOING = re.compile(r"(?:Processing|Collecting|Downloading|Using cached|Building|Installing) .+")
_NOT_NEWS = re.compile(r".*(?:\.metadata(?: \(.*\))?|: finished with status '.*')")
_BYTES = re.compile(r"Progress (\d+) of (\d+)")
"""The format of ``--progress-bar raw``."""


def is_progress(line: str) -> bool:
    return _BYTES.fullmatch(line.strip()) is not None


class PipOutput:
    """Parses pip's output from pieces that may end anywhere."""

    def __init__(self, on_progress: ProgressCallback) -> None:
        self._on_progress = on_progress
        self._rest = b""
        self._doing = ""

    def on_output(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._line(line.decode("utf-8", "replace").strip())

    def _line(self, line: str) -> None:
        if (match := _BYTES.fullmatch(line)) is not None:
            done, total = int(match[1]), int(match[2])
            if self._doing and total:
                self._on_progress(self._doing, 100 * done // total)
        elif _DOING.fullmatch(line):
            self._doing = "" if _NOT_NEWS.fullmatch(line) else line
            if self._doing:
                self._on_progress(line, None)


DEFAULT_DIRECTORY = "~/.local/share/hpcaccel"
"""Commands over SSH look for hpcaccel here unless the profile sets another path."""

SCRIPT = r"""
set -eu
umask 027
python=$1 directory=$2 stamp=$3 extras=$4
shift 4
case $directory in "~/"*) directory=$HOME/${directory#??};; esac
refuse() { echo "$1" >&2; exit 3; }
command -v "$python" >/dev/null 2>&1 ||
  refuse "$python was not found: load a module that provides it, or pass another interpreter with --python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  refuse "$("$python" --version 2>&1) is too old: hpcaccel needs 3.10 or newer. Pass another interpreter with --python"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  refuse "$python has no venv module (Debian: apt install python3-venv): pass another interpreter with --python"
[ ! -e "$directory/env" ] || [ -L "$directory/env" ] ||
  refuse "$directory/env exists and was not created by this command: choose another directory with --dir"
new=$([ -d "$directory" ] || echo yes)
mkdir -p "$directory"
directory=$(CDPATH= cd -- "$directory" && pwd)
target=$directory/env-$stamp
mkdir "$target" || refuse "cannot create $target: another installation may be running"
leave() {
  trap '' HUP INT TERM
  [ "$done" = yes ] || { rm -rf "$target"; rm -f "$directory/.env.$$"; [ -z "$new" ] || rmdir "$directory"; }
}
done=no
trap leave EXIT
trap 'exit 130' HUP INT TERM
"$python" -m venv --without-pip "$target" >&2
"$target/bin/python" -m ensurepip --upgrade --default-pip >&2  # venv itself would hide the errors of this step
mkdir "$target/source"
tar -xf - -C "$target/source"
for wheel in "$target"/source/*.whl; do :; done
bar=off
"$target/bin/python" -c 'import sys, pip; sys.exit([int(n) for n in pip.__version__.split(".")[:2]] < [24, 1])' &&
  bar=raw  # a text format that older versions lack
export PYTHONUNBUFFERED=1
"$target/bin/python" -m pip install --progress-bar $bar --disable-pip-version-check --no-input \
  --constraint "$target/source/constraints.txt" "$wheel$extras" "$@" >&2
{ echo "# Packages in $target, installed by hpcaccel cluster install"
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
    """The output of ``--version``: ``hpcaccel 0.1.0``."""
    program: str
    environment: str
    """The link to the newest environment, which stays valid after an upgrade."""
    lock: str


def install_hpcaccel(
    profile: ClusterProfile,
    *,
    directory: str = DEFAULT_DIRECTORY,
    python: str = "python3",
    wheel: Path | None = None,
    extras: Sequence[str] = (),
    packages: Sequence[str] = (),
    on_progress: ProgressCallback = lambda doing, percent: None,
) -> Installed:
    """Build an environment on the profile's cluster, and switch to it.

    If the installation fails or is interrupted, the new environment is removed and the current one stays in use.

    Args:
        on_progress: called with pip's progress, from another thread.

    Raises:
        UserError: ``wheel`` is not an hpcaccel wheel, or none can be built from the running hpcaccel.
        ClusterError: there is no connection or no suitable Python, the disk is full, or a package cannot be installed.
    """
    sent = archive(wheel)
    stamp = f"{hpcaccel.__version__}-{time.strftime('%Y%m%d-%H%M%S')}"
    group = f"[{','.join(extras)}]" if extras else ""
    command = ["sh", "-c", SCRIPT, "sh", python, directory, stamp, group, *packages]
    code, out, err = _run(profile, command, sent, PipOutput(on_progress).on_output)
    if code != 0:
        where = profile.host or "this machine"
        raise ClusterError(f"nothing was installed on {where}: {_reason(err, directory)}")
    version, base, target = out.strip().split("\n")[-3:]
    return Installed(version, f"{base}/env/bin/hpcaccel", f"{base}/env", f"{target}/hpcaccel-lock.txt")


def _run(
    profile: ClusterProfile, command: list[str], data: bytes, on_output: Callable[[bytes], None]
) -> tuple[int, str, str]:
    if profile.host is None:
        return _run_here(command, data, on_output)
    from hpcaccel.submission.remote import RemoteCluster

    with RemoteCluster(profile) as cluster:
        answer = cluster.run(command, stdin=data, on_output=on_output)
    return answer.code, answer.stdout, answer.stderr


def _run_here(command: list[str], data: bytes, on_output: Callable[[bytes], None]) -> tuple[int, str, str]:
    """Run the script on this machine. Ctrl-C ends pip and lets the script clean up."""
    reading, writing = os.pipe()
    pipe = subprocess.PIPE
    with (
        os.fdopen(reading, "rb", buffering=0) as stderr,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=writing, start_new_session=True) as child,
    ):
        os.close(writing)
        errors = Drain(stderr.read, on_output)
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
_RETRYING = re.compile(r"Retrying .*? after connection broken by (?P<why>.*)")
_CAUSE = re.compile(r"\[Errno -?\d+\] [\w ]+|certificate verify failed[^)'\"]*|[\w ()=.]*timed out[\w ()=.]*")


def _reason(text: str, directory: str) -> str:
    """The cause of a failed installation in one sentence. pip prints many consequences after the first cause."""
    if _NO_ROOM.search(text):
        return (
            f"no space left in {directory} or in the directory for temporary files (TMPDIR). Free some space, or "
            "choose another directory with --dir"
        )
    if (match := _RETRYING.search(text)) is not None:
        cause = _CAUSE.search(match["why"])
        detail = (cause[0] if cause else match["why"][:200]).strip()
        return (
            f"pip cannot reach the package index from there ({detail}). If the site has its own index, set "
            "PIP_INDEX_URL or configure pip there"
        )
    output = [line.strip() for line in text.split("\n") if line.strip() and not is_progress(line)]
    lines = [re.sub(r" \(from versions: [^)]*\)", "", line) for line in output]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " ".join((errors or lines)[-3:])[:600] or "the installation printed no error"
