"""Build Slurm from source into its own prefix, for clusters with another release than the system's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .building import Report, run_step
from .errors import DevClusterError

# slurmdbd's MariaDB plug-in and the munge plug-ins are silently skipped if their headers are missing.
PACKAGE_OF = {
    "cc": "build-essential",
    "make": "build-essential",
    "munge.h": "libmunge-dev",
    "mariadb_config or mysql_config": "libmariadb-dev",
}
NEEDED_PLUGINS = ("accounting_storage_mysql.so", "auth_munge.so")
# Several slurmd on one machine; no X11, REST or sview, which are not used and need further libraries.
OPTIONS = ("--enable-multiple-slurmd", "--with-munge", "--disable-x11", "--disable-slurmrestd", "--disable-sview")


def build_slurm(source: Path, *, prefix: Path | None, build_folder: Path | None, jobs: int, report: Report) -> Path:
    """Configure, compile and install; return the prefix. The source tree is not modified."""
    version = version_of(source)
    prefix = prefix or Path(f"/opt/slurm-{version}")
    if missing := _missing():
        packages = " ".join(dict.fromkeys(PACKAGE_OF[name] for name in missing))
        raise DevClusterError(
            f"not installed: {', '.join(missing)}. Install them: apt-get update && apt-get install "
            f"--yes --no-install-recommends {packages}"
        )
    if (source / "config.status").exists():
        raise DevClusterError(
            f"{source} was configured in place, so that configure cannot build it in another directory: run `make "
            "distclean` in it, or pass an unmodified copy"
        )
    if any(_holds_files(prefix / name) for name in ("bin", "sbin", "lib")):
        raise DevClusterError(
            f"--prefix {prefix} already contains an installation: remove it, or choose another directory"
        )
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
        raise DevClusterError(f"Slurm was built without {', '.join(lost)}; see {log} for what configure did not find")
    if build_folder is None:
        shutil.rmtree(folder)
    return prefix


def version_of(source: Path) -> str:
    """Version in the META file of the source tree, such as ``25.11.7`` or ``26.11.0-0rc1``."""
    try:
        meta = (source / "META").read_text()
    except OSError as error:
        raise DevClusterError(f"{source} is not a Slurm source tree: {error.strerror}: META") from error
    values: dict[str, str] = dict(re.findall(r"^\s*(\w+):\s*(\S+)", meta, re.MULTILINE))
    if values.get("Name") != "slurm" or not (source / "configure").exists():
        raise DevClusterError(
            f"{source} is not a Slurm source tree: META has the name {values.get('Name')!r}, or there is no configure"
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
    return " -c " in line and not line.startswith("libtool:")  # libtool repeats the compiler's commands
