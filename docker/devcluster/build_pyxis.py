"""Build pyxis, Slurm's container plug-in, and enroot, which it uses, from source into one prefix."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import requirements
from .building import Report, run_step
from .errors import DevClusterError

PLUGIN = Path("lib/slurm/spank_pyxis.so")
# Packages of the programs that enroot runs, and of what pyxis and enroot are compiled with.
PACKAGE_OF = {
    "cc": "build-essential",
    "make": "build-essential",
    "strip": "build-essential",
    "mksquashfs": "squashfs-tools",
    "unsquashfs": "squashfs-tools",
    "bsd/string.h": "libbsd-dev",
    "slurm/spank.h": "libslurm-dev",
}
# enroot's own build compiles its helpers statically, with a C library and a libbsd of its own from git submodules.
_BSD = (
    "-include",
    "bsd/string.h",
    "-include",
    "bsd/stdlib.h",
    "-include",
    "bsd/unistd.h",
    "-include",
    "bsd/inttypes.h",
)


# The nodes of a development cluster share a disk, so each needs directories of its own.
NODE_SETTINGS = """
ENROOT_DATA_PATH ${HOME:-/root}/.local/share/enroot/$(uname -n)
ENROOT_RUNTIME_PATH /run/enroot/$(uname -n)
"""


def build_pyxis(pyxis: Path, enroot: Path, *, prefix: Path, report: Report) -> Path:
    """Compile and install both; return the prefix. The source trees are not modified."""
    _check_tree(pyxis, "pyxis_slurmstepd.c", "pyxis")
    _check_tree(enroot, "enroot.in", "enroot")
    headers = _headers_of_slurm()
    if missing := _missing(headers):
        packages = " ".join(dict.fromkeys(PACKAGE_OF[name] for name in missing))
        raise DevClusterError(
            f"not installed: {', '.join(missing)}. Install them: apt-get update && apt-get install "
            f"--yes --no-install-recommends {packages}"
        )
    with tempfile.TemporaryDirectory(prefix="build-pyxis-", dir="/var/tmp") as name:
        folder = Path(name)
        log = folder / "build.log"
        shutil.copytree(pyxis, folder / "pyxis", ignore=shutil.ignore_patterns(".git"))
        env = {**os.environ, "CPPFLAGS": " ".join(headers)}
        command = ["make", "install", f"prefix={prefix}"]
        run_step(f"pyxis, for {prefix}", command, folder=folder / "pyxis", log=log, report=report, env=env)
        report("enroot")
        _install_enroot(enroot, prefix, folder, log, report)
    return prefix


def _install_enroot(source: Path, prefix: Path, folder: Path, log: Path, report: Report) -> None:
    libraries, settings, programs = prefix / "lib/enroot", prefix / "etc/enroot", prefix / "bin"
    for path in (libraries, programs, *(settings / name for name in ("environ.d", "mounts.d", "hooks.d"))):
        path.mkdir(parents=True, exist_ok=True)
    for helper in sorted(source.glob("bin/enroot-*.c")):
        flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", *_BSD, f"-I{source}/deps/libbsd/include"]
        command = ["cc", *flags, str(helper), "-o", str(programs / helper.stem), "-lbsd"]
        run_step(helper.stem, command, folder=folder, log=log, report=lambda _: None)
    for script in source.glob("src/*.sh"):
        shutil.copy(script, libraries)
    for name in ("environ", "mounts", "hooks"):
        for file in source.glob(f"conf/{name}/*.*"):
            shutil.copy(file, settings / f"{name}.d")
    version = re.search(r"^VERSION\s*:=\s*(\S+)", (source / "Makefile").read_text(), re.MULTILINE)
    values = {"sysconfdir": settings, "libdir": libraries, "version": version[1] if version else "unknown"}
    for name, target in (("enroot.in", programs / "enroot"), ("conf/enroot.conf.in", settings / "enroot.conf")):
        text = (source / name).read_text()
        for key, value in values.items():
            text = text.replace(f"@{key}@", str(value))
        target.write_text(text)
    with (settings / "enroot.conf").open("a") as conf:
        conf.write(NODE_SETTINGS)
    (programs / "enroot").chmod(0o755)


def _check_tree(source: Path, file: str, name: str) -> None:
    if not (source / file).is_file():
        raise DevClusterError(f"{source} is not a source tree of {name}: {file} is missing")


def _headers_of_slurm() -> list[str]:
    """Include paths of the Slurm that a cluster would use; a plug-in loads only in the release it was built for."""
    include = [Path(folder).parent / "include" for folder in requirements.slurm_folders()]
    return [f"-I{folder}" for folder in dict.fromkeys(include) if (folder / "slurm/spank.h").exists()]


def _missing(headers: list[str]) -> list[str]:
    missing = [name for name in ("cc", "make", "strip", "mksquashfs", "unsquashfs") if shutil.which(name) is None]
    if "cc" not in missing:
        missing += [name for name in ("bsd/string.h", "slurm/spank.h") if not _has_header(name, headers)]
    return missing


def _has_header(name: str, flags: list[str]) -> bool:
    check = ["cc", *flags, "-E", "-x", "c", "-"]
    answer = subprocess.run(check, input=f"#include <{name}>\n", capture_output=True, text=True, check=False)
    return answer.returncode == 0
