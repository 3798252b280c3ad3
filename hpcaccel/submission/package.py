"""The batch step's program: one zip file that any Python can run, put into the run directory at submit.

It holds the base and ``node``, which need nothing but the standard library. A queued job therefore runs what was
submitted, whatever happens to the installed package meanwhile.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import hpcaccel
from hpcaccel.rundir import atomic_write

__all__ = ["build_node_program", "write_node_program"]

_BASE = ("__init__.py", "errors.py", "process.py", "rundir.py", "records.py", "logged.py", "layout/__init__.py")
_FOLDERS = ("slurm", "node")
_MAIN = "from hpcaccel.node.__main__ import main\n\nmain()\n"
_LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The same time in every archive, so that the same code makes the same bytes."""


def build_node_program() -> bytes:
    """The bytes of ``node.pyz``."""
    package = Path(hpcaccel.__file__).parent
    sources = {f"hpcaccel/{name}": (package / name).read_bytes() for name in _BASE}
    for folder in _FOLDERS:
        for path in (package / folder).rglob("*.py"):
            sources[f"hpcaccel/{path.relative_to(package).as_posix()}"] = path.read_bytes()
    sources["__main__.py"] = _MAIN.encode()
    buffer = io.BytesIO(b"#!/usr/bin/env python3\n")
    buffer.seek(0, io.SEEK_END)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(sources):
            archive.writestr(zipfile.ZipInfo(name, _LONG_AGO), sources[name], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def write_node_program(path: Path) -> None:
    atomic_write(path, build_node_program(), mode=0o750)
