"""Ranks inside of a container: what stands between srun and a rank, for pyxis, Apptainer and enroot.

The supervisor stays outside, with Slurm's commands and the cluster's own Python. Nothing here keeps a container beyond
its step: there is no ``--container-name``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.slurm.pyxis import unmountable

__all__ = [
    "Container",
    "Wrapped",
    "cached_image",
    "choose_runtime",
    "find_apptainer",
    "into_container",
    "read_container",
]

_HOSTS_OWN = (
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYXIS_CONTAINER_NAME",
    "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE", "CONDA_PYTHON_EXE",
)  # fmt: skip
"""Variables that speak of the Python outside, and one that would keep a container beyond its step."""
_OF_A_TASK = (
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""Variables that srun gives each task."""
_OF_THE_HOST = re.compile(r"PATH|HOME|SHELL|PWD|OLDPWD|SHLVL|_|LD_LIBRARY_PATH|LD_PRELOAD|BASH_\w*|\w*[^\w].*")
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class Container:
    """The ``container`` part of ``spec.json``."""

    image: str
    """A path, or a name in a registry with its scheme."""
    runtime: str
    mounts: list[str]
    """``SRC:DST`` or ``SRC:DST:ro``: the user's, and what the ranks need."""
    workdir: str
    gpus: bool
    env: dict[str, str] = field(default_factory=dict)
    images: str = ""
    """The folder of imported images."""
    key: str = ""
    """What the content of a registry's image goes by: its digest where that could be asked, else its name."""

    @property
    def is_file(self) -> bool:
        return self.image.startswith("/")


def read_container(document: Mapping[str, Any] | None) -> Container | None:
    return None if document is None else Container(**document)


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """A command as it is started around a container."""

    srun: list[str]
    """Options for srun, before the command; pyxis alone has any."""
    command: list[str]
    env: dict[str, str]


def find_apptainer() -> str | None:
    return shutil.which("apptainer") or shutil.which("singularity")


def _help_of_srun() -> str:
    """Which options of pyxis srun knows; empty where there is no srun."""
    if shutil.which("srun") is None:
        return ""
    answer = subprocess.run(["srun", "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return answer.stdout


def _has_pyxis() -> bool:
    return "--container-image" in _help_of_srun()


def _pyxis_escapes_mounts() -> bool:
    """From 0.24 on pyxis makes the line of fstab(5) itself and looks for the source as it is given. That release has
    this option, too; none tells its number."""
    return "--container-unshare" in _help_of_srun()


def choose_runtime(container: Container, *, local: bool) -> str:
    """``pyxis``, ``apptainer`` or ``enroot``: as the spec says, otherwise by the image's name and what is here.

    Raises:
        RankEnvironmentError: there is none that could start the image, or that could mount what is to be mounted.
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
            if name == "pyxis" and (why := unmountable(container.mounts)) is not None:
                raise RankEnvironmentError(
                    f"container: {why}. Give it another name, or set container.runtime to what else is here"
                )
            return name
    raise RankEnvironmentError(
        f"container.image {container.image}: no {' or '.join(wanted)} on {os.uname().nodename}. Load its module "
        "(environment.modules) or set container.runtime to what this cluster has"
    )


def cached_image(container: Container, runtime: str) -> Path:
    """The file that a node opens: the image itself, or what is imported from the registry once."""
    if container.is_file:
        return Path(container.image)
    name = _NO_NAME.sub("_", container.image.partition("://")[2])[:80]
    suffix = "sif" if runtime == "apptainer" else "sqsh"
    return Path(container.images) / f"{name}-{container.key}.{suffix}"


def into_container(
    container: Container, runtime: str, command: Sequence[str], env: Mapping[str, str], *, also: Sequence[str] = ()
) -> Wrapped:
    """``command`` inside of the container, with the environment ``env``.

    Values never become arguments: those of the user's secrets would stand in the process list.

    Args:
        also: more mounts.
    """
    image = str(cached_image(container, runtime))
    mounts = [*container.mounts, *also]
    variables = {name: value for name, value in env.items() if name not in _HOSTS_OWN}
    variables.setdefault("PYTHONNOUSERSITE", "1")  # Apptainer shows the home, whose packages are another Python's
    variables.update(container.env)
    if runtime == "pyxis":
        return Wrapped(srun=_pyxis(container, image, mounts), command=list(command), env=variables)
    if runtime == "apptainer":
        _over_the_images_own(variables, container.env)
        return Wrapped(srun=[], command=[*_apptainer(container, image, mounts), *command], env=variables)
    return Wrapped(srun=[], command=[*_enroot(image, mounts, variables), *command], env=variables)


def _pyxis(container: Container, image: str, mounts: Sequence[str]) -> list[str]:
    flags = [f"--container-image={image}", f"--container-workdir={container.workdir}"]
    if mounts:
        if any(_as_in_fstab(mount) != mount for mount in mounts) and not _pyxis_escapes_mounts():
            mounts = [_as_in_fstab(mount) for mount in mounts]
        flags.append(f"--container-mounts={','.join(mounts)}")
    if container.env:
        flags.append(f"--container-env={','.join(container.env)}")  # where the image has the same, the host's counts
    return flags


def _apptainer(container: Container, image: str, mounts: Sequence[str]) -> list[str]:
    words = [find_apptainer() or "apptainer", "exec"]
    if container.gpus:
        words.append("--nv")
    for mount in mounts:
        words += ["--bind", mount]
    return [*words, "--pwd", container.workdir, image]


def _over_the_images_own(variables: MutableMapping[str, str], env: Mapping[str, str]) -> None:
    """Apptainer lets the image's variables win, but for those that are given with this prefix."""
    for name, value in env.items():
        variables[f"APPTAINERENV_{name}"] = variables[f"SINGULARITYENV_{name}"] = value


def _as_in_fstab(mount: str) -> str:
    """enroot, and pyxis up to 0.23, make a line of fstab(5) of a mount, whose fields end at white space."""
    return mount.replace("\\", r"\134").replace(" ", r"\040").replace("\t", r"\011")


def _enroot(image: str, mounts: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """enroot takes over no variable that is not named; its working directory is the rank's own affair."""
    words = ["enroot", "start", "--rw"]
    for mount in mounts:
        source, target, *flags = _as_in_fstab(mount).split(":")
        options = ",".join(["x-create=auto", "rbind", *flags])
        words += ["--mount", f"{source}:{target}:none:{options}"]
    for name in sorted({*variables, *_OF_A_TASK}):
        if not _OF_THE_HOST.fullmatch(name):
            words += ["--env", name]
    return [*words, "--", image]
