"""What the machine must have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

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
# Daemons live in sbin, which is not on everybody's PATH.
SEARCH_PATH = os.pathsep.join(
    [os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"]
)


def environment() -> dict[str, str]:
    """The environment of the daemons: nothing of the caller's but the path and the time zone."""
    kept = {name: os.environ[name] for name in ("TZ",) if name in os.environ}
    return {"PATH": SEARCH_PATH, "HOME": "/root", "LC_ALL": "C.UTF-8", **kept}


def problem() -> str | None:
    """Why no cluster can run here, or None."""
    if sys.platform != "linux":
        return f"a development cluster needs Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return f"a development cluster needs root (munge, several slurmd), this is user {os.geteuid()}"
    if missing := [program for program in PACKAGE_OF if shutil.which(program, path=SEARCH_PATH) is None]:
        return f"not installed: {', '.join(missing)}. To install what is needed: apt-get update && {APT_GET}"
    return _namespace_problem(environment())


def _namespace_problem(env: Mapping[str, str]) -> str | None:
    answer = subprocess.run(["unshare", "--uts", "true"], env=env, capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        return None
    return (
        f"each node needs a host name of its own, and this machine refuses: {answer.stderr.strip()}. "
        "In a container, add the capability SYS_ADMIN (docker run --cap-add SYS_ADMIN)"
    )
