"""Facts about a login node that do not come from Slurm: user, groups, containers, Python and quotas.

One small shell script collects them, on this machine or over SSH. The script needs only a POSIX shell and coreutils,
and writes no files.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hpcaccel.errors import ClusterError
from hpcaccel.spec.cluster.cluster_facts import Quota

__all__ = ["Machine", "Run", "ask", "read"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]
"""A function that runs a program: ``subprocess.run``, or the ``runner`` of a ``RemoteCluster``."""

SECONDS = 60.0

SCRIPT = r"""
LC_ALL=C; export LC_ALL
within() { if command -v timeout >/dev/null 2>&1; then timeout 10 "$@"; else "$@"; fi; }
report() { echo "@@ $1"; shift; within "$@" 2>/dev/null </dev/null; }
program=$1; shift
report user id -un
report groups sh -c 'id -Gnz 2>/dev/null | tr "\0" "\n" || id -Gn | tr " " "\n"'
echo "@@ home"; echo "$HOME"
for name in SCRATCH PSCRATCH WORK WORKDIR PROJECT DATA CSCRATCH SCRATCHDIR; do
  eval "value=\${$name:-}"
  case $value in /*) [ -d "$value" ] && { echo "@@ scratch"; echo "$value"; };; esac
done
report apptainer apptainer --version
report singularity singularity --version
report enroot enroot version
report python python3 -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])'
installed=$HOME/.local/share/hpcaccel/env/bin/hpcaccel
[ "$program" = hpcaccel ] && [ -x "$installed" ] && program=$installed
case $program in "~/"*) program=$HOME/${program#??};; esac
report hpcaccel "$program" --version
for path in "$HOME" "${SCRATCH:-}" "$@"; do
  case $path in "~/"*) path=$HOME/${path#??};; esac
  case $path in /*) ;; *) continue;; esac
  given=$path
  while [ ! -e "$path" ]; do path=$(dirname "$path"); done
  report "bytes $given" df -Pk "$path"
  report "inodes $given" df -Pi "$path"
  command -v lfs >/dev/null 2>&1 && report "lustre $given" lfs quota -q -u "$(id -un)" "$path"
done
command -v quota >/dev/null 2>&1 && report "quota" quota -w
exit 0
"""


@dataclass
class Machine:
    """The facts of a login node. Facts that were not found are empty or None."""

    user: str = ""
    groups: list[str] = field(default_factory=list)
    home: str = ""
    scratch: list[str] = field(default_factory=list)
    apptainer: str | None = None
    singularity: str | None = None
    enroot: str | None = None
    python: str | None = None
    hpcaccel: str | None = None
    quota: list[Quota] = field(default_factory=list)


def ask(run: Run, *, program: str, paths: Sequence[str]) -> Machine:
    """Run the script on the machine on which ``run`` starts programs.

    Args:
        program: the hpcaccel program on that machine: a name on PATH, or a path, which may begin with ``~/``.
        paths: directories whose quotas are needed, besides home and ``$SCRATCH``.

    Raises:
        ClusterError: the machine does not respond in time, or has no ``sh``.
    """
    words = ["sh", "-c", SCRIPT, "sh", program, *paths]
    try:
        result = run(
            words, env={**os.environ, "LC_ALL": "C"}, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
            errors="replace", timeout=SECONDS * 3, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise ClusterError("the login node has no `sh`: hpcaccel needs a POSIX shell there") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"the login node did not respond within {SECONDS * 3:g} s. To check for a file system that hangs, run `df` "
            "there"
        ) from None
    return read(result.stdout)


def read(text: str) -> Machine:
    """Parse the script's output."""
    parts = list(_parts(text))
    values: dict[str, list[str]] = {}
    for name, _, lines in parts:
        values.setdefault(name, []).extend(lines)
    first = {name: lines[0] for name, lines in values.items() if lines}
    return Machine(
        user=first.get("user", ""),
        groups=values.get("groups", []),
        home=first.get("home", ""),
        scratch=list(dict.fromkeys(values.get("scratch", []))),
        apptainer=_version(first.get("apptainer")),
        singularity=_version(first.get("singularity")),
        enroot=_version(first.get("enroot")),
        python=_version(first.get("python")),
        hpcaccel=_version(first.get("hpcaccel")),
        quota=_quotas(parts),
    )


Part = tuple[str, str, list[str]]


def _parts(text: str) -> Iterator[Part]:
    for block in re.split(r"(?m)^@@ ", text)[1:]:
        head, _, body = block.partition("\n")
        name, _, argument = head.partition(" ")
        yield name, argument, [line.strip() for line in body.split("\n") if line.strip()]


def _version(text: str | None) -> str | None:
    """The version in a program's output: ``apptainer version 1.3.4-1.el9`` → 1.3.4-1.el9."""
    match = re.search(r"\d+(?:\.\w+)+(?:[-+][\w.]+)*", text or "")
    return match[0] if match else None


def _quotas(parts: Sequence[Part]) -> list[Quota]:
    """The user's quota for each directory if available, else the size of the whole file system."""
    of_user = {name: numbers for kind, _, lines in parts if kind == "quota" for name, numbers in _quota_rows(lines)}
    found: dict[str, Quota] = {}
    for kind, path, lines in parts:
        row = _df_row(lines)
        if kind == "bytes" and row:
            device, size, used = row
            found[path] = Quota(path=path, source="df", bytes_limit=size * 1024, bytes_used=used * 1024)
            if device in of_user:
                found[path] = _limited(path, "quota", of_user[device])
        elif kind == "inodes" and row and row[1] and path in found and found[path].source == "df":
            found[path] = found[path].model_copy(update={"inodes_limit": row[1], "inodes_used": row[2]})
        elif kind == "lustre":
            numbers = _quota_numbers(" ".join(lines).split()[1:])
            if any(numbers[1:3] + numbers[4:6]):
                found[path] = _limited(path, "lfs quota", numbers)
    return list(found.values())


def _df_row(lines: Sequence[str]) -> tuple[str, int, int] | None:
    """Parse the last row of ``df -P``. Returns device, total and used; the device may contain spaces."""
    match = re.match(r"(.+?)\s+(\d+)\s+(\d+)\s+-?\d+\s+\S+\s+/", lines[-1]) if len(lines) > 1 else None
    return (match[1], int(match[2]), int(match[3])) if match else None


def _quota_rows(lines: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    for line in lines:
        device, *words = line.split()
        if device.startswith(("/", "Filesystem")) or ":" in device:
            numbers = _quota_numbers(words)
            if numbers:
                yield device, numbers


def _quota_numbers(words: Sequence[str]) -> list[int]:
    """Usage, soft limit and hard limit in KiB, then for files; [] for other rows. A star marks an exceeded limit."""
    numbers = [int(word.rstrip("*")) for word in words if re.fullmatch(r"\d+\*?", word)]
    return numbers if len(numbers) >= 6 else []


def _limited(path: str, source: str, numbers: Sequence[int]) -> Quota:
    used, soft, hard, files, soft_files, hard_files = numbers[:6]
    return Quota(
        path=path,
        source=source,
        bytes_limit=(hard or soft) * 1024 or None,
        bytes_used=used * 1024,
        inodes_limit=(hard_files or soft_files) or None,
        inodes_used=files,
    )
