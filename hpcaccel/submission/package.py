"""The batch step's program: one zip file that any Python can run, put into the run directory at submit.

It holds the base and ``node``, which need nothing but the standard library. A queued job therefore runs what was
submitted, whatever happens to the installed package meanwhile.

Beside each source lies what this Python compiles it to: a process that starts from the zip, a rank's shim for instance,
needs half the time then. Another version of Python passes it over (zipimport) and compiles the source.
"""

from __future__ import annotations

import importlib.util
import io
import marshal
import zipfile
from pathlib import Path

import hpcaccel
from hpcaccel.core.run_dir import atomic_write

__all__ = ["build_node_program", "write_node_program"]

_BASE = ("__init__.py", "errors.py", "checkpoint_files/__init__.py")
_FOLDERS = ("core", "slurm", "node")
_MAIN = "from hpcaccel.node.__main__ import main\n\nmain()\n"
_UNCHECKED = (0b01).to_bytes(4, "little")
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
            for entry, data in ((name, sources[name]), (f"{name}c", _compiled(name, sources[name]))):
                archive.writestr(zipfile.ZipInfo(entry, _LONG_AGO), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _compiled(name: str, source: bytes) -> bytes:
    """What Python would keep in its ``__pycache__``, in the form that is not compared with the source (PEP 552)."""
    code = compile(source, name, "exec", dont_inherit=True)
    # Later versions of the format tell what is referred to more than once, which differs from time to time.
    text = marshal.dumps(code, 2)
    return importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(source) + text


def write_node_program(path: Path) -> None:
    atomic_write(path, build_node_program(), mode=0o750)
