"""Checks whether this machine can run a cluster; where Slurm's programs are, and the environment of the daemons."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGE_OF = {
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb-admin": "mariadb-server",
    "slurmdbd": "slurmdbd",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
APT_GET = (
    "apt-get install --yes --no-install-recommends slurmctld slurmd slurmdbd slurm-client slurm-wlm-mysql-plugin munge "
    "mariadb-server openssh-server iproute2"
)
_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
# Daemons are in sbin, which is not on every user's PATH.
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", *_SYSTEM_FOLDERS])


def slurm_folders() -> tuple[str, ...]:
    """Directories of the Slurm that is first on PATH; empty for the system's, which every login shell finds."""
    found = [shutil.which(program, path=SEARCH_PATH) for program in ("sbatch", "slurmctld")]
    folders = dict.fromkeys(os.path.dirname(path) for path in found if path is not None)
    return tuple(folder for folder in folders if folder not in _SYSTEM_FOLDERS)


def search_path(slurm_folders: Sequence[str]) -> str:
    """Search path for programs in a cluster that was started with the Slurm of these directories."""
    return os.pathsep.join([*slurm_folders, SEARCH_PATH])


def environment(slurm_folders: Sequence[str] = ()) -> dict[str, str]:
    """The environment of the daemons. It takes only PATH and TZ from the caller's environment."""
    kept = {name: os.environ[name] for name in ("TZ",) if name in os.environ}
    return {"PATH": search_path(slurm_folders), "HOME": "/root", "LC_ALL": "C.UTF-8", **kept}


def slurm_version(folders: Sequence[str] = ()) -> str:
    """Version such as ``22.05.8``, from slurmctld, which unlike sbatch prints it without a configuration."""
    env = environment(folders)
    answer = subprocess.run(["slurmctld", "-V"], env=env, capture_output=True, text=True, check=False)
    words = answer.stdout.split()
    return words[-1] if words else "of an unknown release"


def problem() -> str | None:
    """Why no cluster can run on this machine, or None."""
    if sys.platform != "linux":
        return f"a development cluster needs Linux, and this machine runs {sys.platform}"
    if os.geteuid() != 0:
        return f"a development cluster needs root (for munge and several slurmd), and this is user {os.geteuid()}"
    if missing := [program for program in PACKAGE_OF if shutil.which(program, path=SEARCH_PATH) is None]:
        return f"not installed: {', '.join(missing)}. Install them: apt-get update && {APT_GET}"
    return _mixture_problem() or _namespace_problem(environment())


def _mixture_problem() -> str | None:
    """The problem if programs are from different installations (as with one whose sbin is not on PATH), or None."""
    names = ("sbatch", "slurmctld", "slurmd", "slurmdbd")
    found = [Path(path) for name in names if (path := shutil.which(name, path=SEARCH_PATH))]
    if len({path.resolve().parents[1] for path in found}) == 1:
        return None
    listed = ", ".join(map(str, found))
    return f"Slurm's programs are from different installations: {listed}. Put bin and sbin of one of them first on PATH"


def _namespace_problem(env: Mapping[str, str]) -> str | None:
    answer = subprocess.run(["unshare", "--uts", "true"], env=env, capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        return None
    return (
        f"each node needs its own host name, and this machine does not permit it: {answer.stderr.strip()}. "
        "In a container, add the capability SYS_ADMIN (docker run --cap-add SYS_ADMIN)"
    )
