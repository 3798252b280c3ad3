"""Staging: copies user data to the nodes' local disks before the ranks start.

Files that are already present and unchanged are not copied again. The name of an incomplete copy contains the size and
modification time of its source, so that an interrupted copy is resumed only if the source is still the same.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import lock_file, objects_in
from hpcaccel.core.launch_spec import LaunchSpec, LaunchStage
from hpcaccel.core.process_identity import node_name
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.node.allocation import SHORT_STEP
from hpcaccel.slurm import hostlist

__all__ = ["STAGE_DIR", "NoRoom", "bring", "each_node", "problem_in", "stage_directory", "stage_here", "unstage_here"]

STAGE_DIR = "HPCACCEL_STAGE_DIR"
"""Environment variable for the ranks: the folder on the node's local disk that contains a copy of each source, under
the name of the source."""

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def stage_directory(stage: LaunchStage, env: Mapping[str, str]) -> Path:
    """The folder for the copies, at the same path on every node. With ``stage.keep``, jobs with the same sources share
    this folder.

    Raises:
        RankEnvironmentError: the path uses a variable that is not set in the job, or is not absolute.
    """
    base = stage.directory or env.get("SLURM_TMPDIR") or env.get("TMPDIR") or "/tmp"

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not env.get(name):
            raise RankEnvironmentError(
                f"stage.directory {base!r}: ${name} is not set in this job. Set a directory that exists on every node"
            )
        return env[name]

    place = Path(_VARIABLE.sub(value, base))
    if not place.is_absolute():
        raise RankEnvironmentError(
            f"stage.directory {base!r} expands to {str(place)!r}. Set it to an absolute path that exists on every node"
        )
    return place / f"hpcaccel-stage-{os.getuid()}-{_key(stage, env)}"


def _key(stage: LaunchStage, env: Mapping[str, str]) -> str:
    if not stage.keep:
        array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID") or env["HPCACCEL_LOCAL_JOB"]
    return hashlib.sha256(json.dumps(stage.sources).encode()).hexdigest()[:16]


def each_node(run: RunDir, launch: LaunchSpec, arguments: Sequence[str], *, avoid: Sequence[str] = ()) -> list[str]:
    """The command line that runs ``node.pyz arguments`` once on each of the ranks' nodes."""
    program = [sys.executable, str(run.node_program), *arguments]
    if launch.local:
        return program
    tasks = [f"--nodes={launch.nodes}", f"--ntasks={launch.nodes}", "--ntasks-per-node=1", "--export=ALL", "--chdir=/"]
    tasks += ["--kill-on-bad-exit=1", "--unbuffered", "--input=none", SHORT_STEP]
    tasks += [f"--exclude={hostlist.compress(avoid)}"] if avoid else []
    return ["srun", *tasks, *program]


def stage_here(launch: LaunchSpec, directory: Path) -> int:
    """Copy all sources to this node, and print the result as one JSON line. Returns exit code 0, or 1 on a problem."""
    assert launch.stage is not None
    answer: dict[str, Any] = {"node": node_name()}
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        copied = sum(bring(Path(source), directory) for source in launch.stage.sources)
        answer["copied_bytes"] = copied
    except NoRoom as error:
        answer["problem"] = str(error)
    except OSError as error:
        where = error.filename or directory
        answer["problem"] = f"cannot copy to {directory}: {where}: {error.strerror or error}"
    print(json.dumps(answer), flush=True)
    return 1 if "problem" in answer else 0


def unstage_here(directory: Path) -> int:
    """Remove the staged copies from this node. Returns exit code 0."""
    shutil.rmtree(directory, ignore_errors=True)
    return 0


def problem_in(lines: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the first problem that nodes reported, as one sentence, and the nodes that reported it. Both are empty if
    there was no problem."""
    problems: dict[str, list[str]] = {}
    for found in objects_in("\n".join(lines), keys={"node", "problem"}):
        if found["problem"]:
            problems.setdefault(str(found["problem"]), []).append(str(found["node"]))
    if not problems:
        return "", []
    text, nodes = next(iter(problems.items()))
    return f"{hostlist.compress(nodes)}: {text}", nodes


CHUNK_BYTES = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
SPARE_BYTES = 1 << 20
"""Space that must remain free on the disk."""


class NoRoom(Exception):
    """The node's disk has too little free space for the data to stage. The text is for the user."""


def bring(source: Path, directory: Path) -> int:
    """Copy ``source`` into ``directory`` under its own name. Returns the number of bytes that had to be copied.

    Raises:
        NoRoom: the disk has too little free space. This may become apparent only while copying.
        OSError: a file cannot be read or written.
    """
    target = directory / source.name
    with (directory / f".{source.name}.lock").open("w") as lock:
        lock_file(lock)  # with stage.keep several jobs may stage the same data: only one of them copies it
        missing = [(one, to) for one, to in _files(source, target) if not _same(one, to)]
        needed = sum(one.stat().st_size - _begun(one, to) for one, to in missing)
        _check_room(directory, needed, source)
        try:
            for one, to in missing:
                _copy(one, to)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise NoRoom(_no_room(directory, needed, source)) from None
        _forget_others(source, target)
        return needed


def _files(source: Path, target: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each source file together with the path of its copy, and create the folders of the copies. Symbolic links
    are followed, including those that point outside the source."""
    if not source.is_dir():
        source.stat()  # raises an error if the source is missing
        yield source, target
        return
    target.mkdir(exist_ok=True)
    for folder, names, files in os.walk(source, onerror=_raise, followlinks=True):
        place = target / Path(folder).relative_to(source)
        for name in names:
            (place / name).mkdir(exist_ok=True)
        for name in files:
            yield Path(folder, name), place / name


def _raise(error: OSError) -> None:
    raise error


def _same(source: Path, copy: Path) -> bool:
    try:
        there = copy.stat()
    except FileNotFoundError:
        return False
    given = source.stat()
    return (there.st_size, there.st_mtime_ns) == (given.st_size, given.st_mtime_ns)


def _part(source: Path, copy: Path) -> Path:
    given = source.stat()
    return copy.with_name(f".{copy.name}.{given.st_size}.{given.st_mtime_ns}.part")


def _begun(source: Path, copy: Path) -> int:
    part = _part(source, copy)
    return part.stat().st_size if part.exists() else 0


def _copy(source: Path, copy: Path) -> None:
    part = _part(source, copy)
    given = source.stat()
    with source.open("rb") as reader, part.open("ab") as writer:
        reader.seek(writer.tell())
        shutil.copyfileobj(reader, writer, CHUNK_BYTES)
    if part.stat().st_size != given.st_size:
        part.unlink()
        raise OSError(errno.EIO, "changed while it was being copied", str(source))
    part.chmod(given.st_mode & 0o777 | 0o600)
    os.utime(part, ns=(given.st_atime_ns, given.st_mtime_ns))
    os.replace(part, copy)


def _check_room(directory: Path, needed: int, source: Path) -> None:
    if needed and needed + SPARE_BYTES > shutil.disk_usage(directory).free:
        raise NoRoom(_no_room(directory, needed, source))


def _no_room(directory: Path, needed: int, source: Path) -> str:
    free = shutil.disk_usage(directory).free
    return (
        f"stage: {source} needs {needed / 1e9:.2f} GB more on {directory.parent}, which has {free / 1e9:.2f} GB free. "
        "Stage less, set stage.directory to a larger disk, or request one with slurm.tmp"
    )


def _forget_others(source: Path, target: Path) -> None:
    """Remove copies of files that the source no longer has, and incomplete copies of earlier versions."""
    if not source.is_dir():
        for left in target.parent.glob(f".{target.name}.*.part"):
            left.unlink()
        return
    for folder, _, files in os.walk(target):
        origin = source / Path(folder).relative_to(target)
        for name in files:
            if not (origin / name).exists():
                Path(folder, name).unlink()
