"""Ranks in containers: the command line that starts a rank in pyxis, Apptainer or enroot, and the import of an image.

The supervisor runs outside the container, with Slurm's commands and the cluster's Python. A container ends with its
step, because ``--container-name``, which would keep it, is never used. An image from a registry is imported once for
all nodes and jobs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.durable_files import lock_file
from hpcaccel.core.launch_spec import LaunchContainer, read_launch
from hpcaccel.core.process_identity import node_name
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.slurm.site_parsing import unmountable_by_pyxis

__all__ = [
    "Wrapped",
    "cached_image",
    "choose_runtime",
    "enroot_uri",
    "find_apptainer",
    "import_for",
    "import_image",
    "into_container",
    "plain_uri",
]

log = logging.getLogger(__name__)

_HOSTS_OWN = (
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYXIS_CONTAINER_NAME",
    "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE", "CONDA_PYTHON_EXE",
)  # fmt: skip
"""Variables that are not passed into a container: those of the Python outside, and one that would make the container
outlive its step."""
_OF_A_TASK = (
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""Variables that srun sets for each task; enroot must pass them on, too."""
_OF_THE_HOST = re.compile(r"PATH|HOME|SHELL|PWD|OLDPWD|SHLVL|_|LD_LIBRARY_PATH|LD_PRELOAD|BASH_\w*|\w*[^\w].*")
"""Variables not passed on through enroot: those of the host, and names that are not identifiers (bash functions)."""
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
"""Characters of an image's name that are replaced by ``_`` in its file name."""


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """A command and its environment, wrapped if the ranks run in a container."""

    srun: list[str]
    """srun options, which come before the command. Only pyxis needs any."""
    command: list[str]
    env: dict[str, str]


def find_apptainer() -> str | None:
    return shutil.which("apptainer") or shutil.which("singularity")


def _help_of_srun() -> str:
    """The output of ``srun --help``, which lists pyxis's options if pyxis is installed; empty if there is no srun."""
    if shutil.which("srun") is None:
        return ""
    answer = subprocess.run(["srun", "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return answer.stdout


def _has_pyxis() -> bool:
    return "--container-image" in _help_of_srun()


def _pyxis_escapes_mounts() -> bool:
    """Whether pyxis escapes mounts for fstab(5) itself (0.24 or newer). pyxis reports no version, so this tests for an
    option that only these releases have."""
    return "--container-unshare" in _help_of_srun()


def choose_runtime(container: LaunchContainer, *, local: bool) -> str:
    """``pyxis``, ``apptainer`` or ``enroot``: the spec's choice, else the first installed one that fits the image.

    Raises:
        RankEnvironmentError: the spec's runtime is not installed; with ``auto``, no installed runtime can start the
            image; or pyxis cannot mount one of the paths.
    """
    here = {
        "pyxis": lambda: not local and _has_pyxis(),
        "apptainer": lambda: find_apptainer() is not None,
        "enroot": lambda: shutil.which("enroot") is not None,
    }
    if container.runtime != "auto":
        wanted: Sequence[str] = (container.runtime,)
    elif container.image.endswith(".sqsh"):
        wanted = ("pyxis", "enroot")
    elif container.is_file:
        wanted = ("apptainer",)
    else:
        wanted = ("pyxis", "apptainer", "enroot")
    for name in wanted:
        if here[name]():
            if name == "pyxis" and (why := unmountable_by_pyxis(container.mounts)) is not None:
                raise RankEnvironmentError(
                    f"container: {why}. Rename the path, or set container.runtime to another installed runtime"
                )
            return name
    raise RankEnvironmentError(
        f"container.image {container.image!r}: found no {' or '.join(wanted)} on {os.uname().nodename}. Load a "
        "module for it (environment.modules), or set container.runtime to a runtime that this cluster has"
    )


def cached_image(container: LaunchContainer, runtime: str) -> Path:
    """The image file that a node opens: the spec's own file, or the file imported from the registry."""
    if container.is_file:
        return Path(container.image)
    name = _NO_NAME.sub("_", container.image.partition("://")[2])[:80]
    suffix = "sif" if runtime == "apptainer" else "sqsh"
    return Path(container.images) / f"{name}-{container.key}.{suffix}"


def into_container(
    container: LaunchContainer,
    runtime: str,
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    also: Sequence[str] = (),
) -> Wrapped:
    """Wrap ``command`` to run inside the container with the environment ``env``.

    Values of variables are never passed as command-line arguments, which would show secrets in the process list.

    Args:
        also: additional mounts, ``source:target``.
    """
    image = str(cached_image(container, runtime))
    mounts = [*container.mounts, *also]
    variables = {name: value for name, value in env.items() if name not in _HOSTS_OWN}
    variables.setdefault("PYTHONNOUSERSITE", "1")  # Apptainer mounts $HOME, where another Python's packages are
    variables.update(container.env)
    if runtime == "pyxis":
        return Wrapped(srun=_pyxis(container, image, mounts), command=list(command), env=variables)
    if runtime == "apptainer":
        _over_the_images_own(variables, container.env)
        return Wrapped(srun=[], command=[*_apptainer(container, image, mounts), *command], env=variables)
    return Wrapped(srun=[], command=[*_enroot(image, mounts, variables), *command], env=variables)


def _pyxis(container: LaunchContainer, image: str, mounts: Sequence[str]) -> list[str]:
    flags = [f"--container-image={image}", f"--container-workdir={container.workdir}"]
    if mounts:
        if any(_as_in_fstab(mount) != mount for mount in mounts) and not _pyxis_escapes_mounts():
            mounts = [_as_in_fstab(mount) for mount in mounts]
        flags.append(f"--container-mounts={','.join(mounts)}")
    if container.env:
        flags.append(f"--container-env={','.join(container.env)}")  # the host's value overrides the image's
    return flags


def _apptainer(container: LaunchContainer, image: str, mounts: Sequence[str]) -> list[str]:
    command = [find_apptainer() or "apptainer", "exec"]
    if container.gpus:
        command.append("--nv")
    for mount in mounts:
        command += ["--bind", mount]
    return [*command, "--pwd", container.workdir, image]


def _over_the_images_own(variables: MutableMapping[str, str], env: Mapping[str, str]) -> None:
    """Set ``env`` under Apptainer's prefixed names, too: otherwise the image's own values take precedence."""
    for name, value in env.items():
        variables[f"APPTAINERENV_{name}"] = variables[f"SINGULARITYENV_{name}"] = value


def _as_in_fstab(mount: str) -> str:
    """Escape a mount for enroot and for pyxis up to 0.23, which write mounts unchanged to an fstab(5) line. The fields
    of such a line end at white space."""
    return mount.replace("\\", r"\134").replace(" ", r"\040").replace("\t", r"\011")


def _enroot(image: str, mounts: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """enroot's command line. enroot passes on only named variables. It has no option for the working directory, so the
    rank's shim changes to that directory."""
    command = ["enroot", "start", "--rw"]
    for mount in mounts:
        source, target, *flags = _as_in_fstab(mount).split(":")
        options = ",".join(["x-create=auto", "rbind", *flags])
        command += ["--mount", f"{source}:{target}:none:{options}"]
    for name in sorted({*variables, *_OF_A_TASK}):
        if not _OF_THE_HOST.fullmatch(name):
            command += ["--env", name]
    return [*command, "--", image]


def import_image(container: LaunchContainer, runtime: str) -> Path:
    """Import the image from the registry if its file is missing. Returns the image file.

    Raises:
        RankEnvironmentError: the image file does not exist, or the import failed.
    """
    path = cached_image(container, runtime)
    if container.is_file:
        if not path.exists():
            raise RankEnvironmentError(f"container.image {str(path)!r} does not exist on {os.uname().nodename}")
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    with _lock(path):
        if not path.exists():
            _fetch(container, runtime, path)
    return path


def import_for(run: RunDir, runtime: str) -> int:
    """Import the image of ``run``. Returns exit code 0, or 1 after an error, which is printed as one line of JSON."""
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
        state = lock_file(file, wait=False)
        if state == "busy":
            log.info(f"waiting for another job that is importing {path.name}")
            state = lock_file(file)
        if state == "unsupported":
            log.warning(
                f"{path.parent} does not support file locks: other jobs may import {path.name} at the same time"
            )
        yield


def _fetch(container: LaunchContainer, runtime: str, path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.part")
    for left in path.parent.glob(f".{path.name}.*.part"):
        if time.time() - left.stat().st_mtime > 3600:  # from a job that was killed
            left.unlink(missing_ok=True)
    if runtime == "apptainer":
        command = [find_apptainer() or "apptainer", "pull", "--force", str(part), plain_uri(container.image)]
    else:
        command = ["enroot", "import", "--output", str(part), enroot_uri(container.image)]
    log.info(f"importing {container.image} to {path}")
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode
        if code or not part.exists():
            raise RankEnvironmentError(
                f"cannot import container.image {container.image!r}: {command[0]} exited with code {code}"
            )
        os.rename(part, path)
    except FileNotFoundError:
        raise RankEnvironmentError(
            f"cannot import container.image {container.image!r}: {command[0]} is not installed on "
            f"{os.uname().nodename}. Load a module for it (environment.modules), or set "
            "container.runtime to another runtime"
        ) from None
    finally:
        part.unlink(missing_ok=True)


def plain_uri(image: str) -> str:
    """The image's URI in Docker's form: ``docker://nvcr.io/nvidia/pytorch:25.09``."""
    return image.replace("#", "/", 1)


def enroot_uri(image: str) -> str:
    """The image's URI in enroot's form, with ``#`` after a registry: ``docker://nvcr.io#nvidia/pytorch:25.09``."""
    scheme, _, name = image.partition("://")
    registry, slash, rest = name.partition("/")
    is_registry = "." in registry or ":" in registry or registry == "localhost"
    if "#" in name or not (slash and is_registry):
        return image
    return f"{scheme}://{registry}#{rest}"
