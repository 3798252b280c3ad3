"""Importing an image from a registry: once for all nodes and jobs, by whoever comes first, the others wait."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcaccel.core.process_identity import node_name
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.node.environment.container_command import Container, cached_image, find_apptainer
from hpcaccel.node.launch_spec import read_launch

__all__ = ["enroot_uri", "import_for", "import_image", "plain_uri"]

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def import_image(container: Container, runtime: str) -> Path:
    """The image's file, which is made where it is not there yet.

    Raises:
        RankEnvironmentError: a file that is not there, or a registry that does not give the image.
    """
    path = cached_image(container, runtime)
    if container.is_file:
        if not path.exists():
            raise RankEnvironmentError(f"container.image {str(path)!r} is not there on {os.uname().nodename}")
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    with _lock(path):
        if not path.exists():
            _fetch(container, runtime, path)
    return path


def import_for(run: RunDir, runtime: str) -> int:
    """The same for a run; what goes wrong is the last line on standard output."""
    container = read_launch(run).container
    assert container is not None
    try:
        import_image(container, runtime)
    except (RankEnvironmentError, OSError) as error:
        print(json.dumps({"node": node_name(), "problem": str(error)}), flush=True)
        return 1
    return 0


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.with_name(f".{path.name}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"hpcaccel: waiting for another job, which imports {path.name}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(
                f"hpcaccel: no locks on {path.parent}: others may import it too",
                file=sys.stderr,
                flush=True,
            )
        yield


def _fetch(container: Container, runtime: str, path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.part")
    for left in path.parent.glob(f".{path.name}.*.part"):
        if time.time() - left.stat().st_mtime > 3600:  # of a job that was killed meanwhile
            left.unlink(missing_ok=True)
    if runtime == "apptainer":
        command = [find_apptainer() or "apptainer", "pull", "--force", str(part), plain_uri(container.image)]
    else:
        command = ["enroot", "import", "--output", str(part), enroot_uri(container.image)]
    print(f"hpcaccel: importing {container.image} to {path}", file=sys.stderr, flush=True)
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode
        if code or not part.exists():
            raise RankEnvironmentError(
                f"container.image {container.image} could not be imported: {command[0]} ended with code {code}"
            )
        os.rename(part, path)
    except FileNotFoundError:
        raise RankEnvironmentError(
            f"container.image {container.image}: there is no {command[0]} on {os.uname().nodename} to import it with"
        ) from None
    finally:
        part.unlink(missing_ok=True)


def plain_uri(image: str) -> str:
    """As Docker writes it: ``docker://nvcr.io/nvidia/pytorch:25.09``."""
    return image.replace("#", "/", 1)


def enroot_uri(image: str) -> str:
    """As enroot writes it, with ``#`` behind the registry: ``docker://nvcr.io#nvidia/pytorch:25.09``."""
    scheme, _, name = image.partition("://")
    registry, slash, rest = name.partition("/")
    is_registry = "." in registry or ":" in registry or registry == "localhost"
    if "#" in name or not (slash and is_registry):
        return image
    return f"{scheme}://{registry}#{rest}"
