"""The parts of hpcaccel that are copied into a run directory.

The batch step's program is one zip file with ``core``, ``slurm`` and ``node``, which import the standard library only,
and with the module ``pynvml``, which the sampler imports on nodes with NVIDIA's driver.
The ranks' part is a folder for containers whose image has torch but not hpcaccel. The loader shield is a folder with a
``sitecustomize`` that keeps data-loader workers alive through a SIGTERM from Slurm. The trainer bridge is such a folder
too; its ``sitecustomize`` adds hpcaccel's callback to transformers' Trainer. All are copies, so that an upgrade of
hpcaccel does not change queued jobs.
"""

from __future__ import annotations

import importlib.util
import io
import marshal
import shutil
import zipfile
from pathlib import Path

import hpcaccel
from hpcaccel.core.durable_files import atomic_write

__all__ = [
    "LOADER_SHIELD",
    "RANK_SIDE",
    "TRAINER_BRIDGE",
    "build_node_program",
    "write_node_program",
    "write_rank_side",
    "write_sitecustomize",
]


_BASE = ("__init__.py", "errors.py", "checkpoint_files/__init__.py", "checkpoint_files/watched.py")
_FOLDERS = ("core", "slurm", "node")
_MAIN = "from hpcaccel.node.__main__ import main\n\nmain()\n"
_UNCHECKED = (0b01).to_bytes(4, "little")
_LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""A fixed timestamp, so that the same code gives the same bytes."""


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
        if (nvml := importlib.util.find_spec("pynvml")) is not None and nvml.origin is not None:
            # Without bytecode, to spare each submission its compilation: only samplers on nodes with GPUs import it.
            data = Path(nvml.origin).read_bytes()
            archive.writestr(zipfile.ZipInfo("pynvml.py", _LONG_AGO), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _compiled(name: str, source: bytes) -> bytes:
    """The bytecode of ``source`` as an unchecked hash-based pyc (PEP 552), which is not compared with the source."""
    code = compile(source, name, "exec", dont_inherit=True)
    # Marshal version 2: later versions mark repeated references, and these marks differ between runs.
    text = marshal.dumps(code, 2)
    return importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(source) + text


def write_node_program(path: Path) -> None:
    atomic_write(path, build_node_program(), mode=0o750)


RANK_SIDE = "rank_side"
"""Folder in the run directory with hpcaccel for ranks in containers: read-only, in PYTHONPATH after the copied code."""

LOADER_SHIELD = "loader_shield"
"""Folder in the run directory that is added to the PYTHONPATH of ranks that are stopped by signals."""

TRAINER_BRIDGE = "trainer_bridge"
"""Folder in the run directory that is added to the PYTHONPATH of ranks with ``runtime.bridge``."""

_NOT_FOR_RANKS = {"spec", "render", "submission", "sweeps", "view", "service", "cli", "node", "templates"}


def write_rank_side(folder: Path) -> None:
    """Create ``folder`` with the ranks' part of the package: base, checkpoint, runtime, and Accelerate's import paths.

    Raises:
        OSError: the folder cannot be written.
    """
    package = Path(hpcaccel.__file__).parent

    def leave_out(place: str, names: list[str]) -> set[str]:
        unwanted = {name for name in names if name == "__pycache__" or name.endswith((".pyc", ".so"))}
        return unwanted | (_NOT_FOR_RANKS.intersection(names) if Path(place) == package else set())

    shutil.copytree(package, folder / package.name, ignore=leave_out)


def write_sitecustomize(run: Path, name: str) -> None:
    """Create the folder ``name`` in ``run`` with its ``sitecustomize.py``.

    Args:
        name: ``LOADER_SHIELD`` or ``TRAINER_BRIDGE``.

    Raises:
        OSError: the folder cannot be written.
    """
    (run / name).mkdir(mode=0o750)
    source = Path(hpcaccel.__file__).parent / "submission" / "entrypoint" / name
    shutil.copyfile(source / "sitecustomize.py", run / name / "sitecustomize.py")
