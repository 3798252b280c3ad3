"""Slurm from its source tree, into a prefix of its own: for clusters of another release than the system's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .building import Report, run_step
from .errors import DevClusterError

# slurmdbd's plug-in for MariaDB and everybody's for munge are left out without a word where their headers are missing.
PACKAGE_OF = {
    "cc": "build-essential",
    "make": "build-essential",
    "munge.h": "libmunge-dev",
    "mariadb_config or mysql_config": "libmariadb-dev",
}
NEEDED_PLUGINS = ("accounting_storage_mysql.so", "auth_munge.so")
# Several slurmd on one machine; no X11, REST or sview, which nobody here uses and which need further libraries.
OPTIONS = ("--enable-multiple-slurmd", "--with-munge", "--disable-x11", "--disable-slurmrestd", "--disable-sview")


def build_slurm(source: Path, *, prefix: Path | None, build_folder: Path | None, jobs: int, report: Report) -> Path:
    """Configures, compiles and installs; returns the prefix. The source tree is left as it is."""
    version = version_of(source)
    prefix = prefix or Path(f"/opt/slurm-{version}")
    if missing := _missing():
        packages = " ".join(dict.fromkeys(PACKAGE_OF[name] for name in missing))
        raise DevClusterError(
            f"not installed: {', '.join(missing)}. To install what is needed: apt-get update && apt-get install "
            f"--yes --no-install-recommends {packages}"
        )
    if (source / "config.status").exists():
        raise DevClusterError(
            f"{source} has been configured in place, and from such a tree configure builds nowhere else: run `make "
            "distclean` in it, or name an untouched copy"
        )
    if any(_holds_files(prefix / name) for name in ("bin", "sbin", "lib")):
        raise DevClusterError(f"--prefix {prefix} holds an installation already: remove it, or name another folder")
    folder = build_folder or Path(tempfile.mkdtemp(prefix=f"build-slurm-{version}-", dir="/var/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    report(f"Slurm {version} from {source}, compiled in {folder}, for {prefix}")
    configure = [str(source / "configure"), f"--prefix={prefix}", f"--sysconfdir={prefix}/etc", *OPTIONS]
    run_step("configure", configure, folder=folder, log=log, report=report)
    run_step("make", ["make", f"--jobs={jobs}"], folder=folder, log=log, report=report, count=_is_compilation)
    run_step("make install", ["make", "install"], folder=folder, log=log, report=report)
    plugins = prefix / "lib" / "slurm"
    if lost := [name for name in NEEDED_PLUGINS if not (plugins / name).exists()]:
        raise DevClusterError(f"Slurm was built without {', '.join(lost)}; {log} says what configure did not find")
    if build_folder is None:
        shutil.rmtree(folder)
    return prefix


def version_of(source: Path) -> str:
    """E.g. ``25.11.7`` or ``26.11.0-0rc1``, as the tree's META has it."""
    try:
        meta = (source / "META").read_text()
    except OSError as error:
        raise DevClusterError(f"{source} is no source tree of Slurm: {error.strerror}: META") from error
    values: dict[str, str] = dict(re.findall(r"^\s*(\w+):\s*(\S+)", meta, re.MULTILINE))
    if values.get("Name") != "slurm" or not (source / "configure").exists():
        raise DevClusterError(
            f"{source} is no source tree of Slurm: META names {values.get('Name')!r}, or no configure"
        )
    release = values.get("Release", "1")
    return values["Version"] + ("" if release == "1" else f"-{release}")


def _missing() -> list[str]:
    missing = [program for program in ("cc", "make") if shutil.which(program) is None]
    if "cc" not in missing and not _has_header("munge.h"):
        missing.append("munge.h")
    if shutil.which("mariadb_config") is None and shutil.which("mysql_config") is None:
        missing.append("mariadb_config or mysql_config")
    return missing


def _has_header(name: str) -> bool:
    check = ["cc", "-E", "-x", "c", "-"]
    answer = subprocess.run(check, input=f"#include <{name}>\n", capture_output=True, text=True, check=False)
    return answer.returncode == 0


def _holds_files(folder: Path) -> bool:
    return folder.is_dir() and any(os.scandir(folder))


def _is_compilation(line: str) -> bool:
    return " -c " in line and not line.startswith("libtool:")  # libtool repeats its compiler's command, or two
