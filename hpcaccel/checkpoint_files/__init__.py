"""Checkpoint directories: their names, their manifests, and which are committed. Does not import torch.

``checkpoints/step_00001200/`` is a committed checkpoint if it contains a readable ``COMMITTED`` manifest. A save first
writes to ``checkpoints/.step_00001200.<attempt>.tmp/``, which is renamed once it is complete. A directory with the
final name but without a manifest is therefore damaged, never unfinished.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import write_json

__all__ = [
    "MANIFEST",
    "PINNED",
    "PUT_ASIDE",
    "QUARANTINED",
    "SUPERSEDED",
    "Checkpoint",
    "SavePaths",
    "attempt_of",
    "checkpoint_name",
    "committed",
    "is_pinned",
    "newest",
    "pin",
    "read_manifest",
    "step_directories",
    "step_of",
    "temporary_name",
    "unpin",
]

MANIFEST = "COMMITTED"
PINNED = "PINNED"
"""Marker file beside the manifest: hpcaccel does not delete a checkpoint that has it. The file contains the reason."""
QUARANTINED, SUPERSEDED = PUT_ASIDE = ("quarantined", "superseded")
"""Prefixes of directories that no longer count as checkpoints: damaged, or from an abandoned branch of the training."""

_NAME = re.compile(r"step_(\d{8,})$")
_TEMPORARY = re.compile(r"\.step_\d{8,}\.(\d+)\.tmp")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its directory, its optimizer step and its manifest."""

    path: Path
    step: int
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class SavePaths:
    """The directories of one save, side by side in ``directory``.

    Args:
        attempt: number of the run's attempt, or a name.
    """

    directory: Path
    step: int
    attempt: int | str

    @property
    def final(self) -> Path:
        return self.directory / checkpoint_name(self.step)

    @property
    def temporary(self) -> Path:
        return self._temporary("")

    @property
    def results(self) -> Path:
        """Folder in which the writer processes report their files."""
        return self._temporary(".results")

    @property
    def extra(self) -> Path:
        """Directory that the script's hooks and other libraries write to before the save begins."""
        return self._temporary(".extra")

    def _temporary(self, kind: str) -> Path:
        return self.directory / temporary_name(self.step, f"{self.attempt}{kind}")


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step of the checkpoint directory ``name``; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def temporary_name(step: int, attempt: int | str) -> str:
    return f".{checkpoint_name(step)}.{attempt}.tmp"


def attempt_of(name: str) -> int | None:
    """Number of the attempt that writes to the temporary directory ``name``; None for any other name."""
    match = _TEMPORARY.fullmatch(name)
    return int(match[1]) if match else None


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint directory; None if it is missing or unreadable."""
    try:
        value = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def committed(directory: Path) -> list[Checkpoint]:
    """All committed checkpoints in ``directory`` (a run's ``checkpoints/``), oldest step first."""
    found = []
    try:
        entries = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    for path in entries:
        match = _NAME.fullmatch(path.name)
        if match and (manifest := read_manifest(path)) is not None:
            found.append(Checkpoint(path, int(match[1]), manifest))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def step_directories(directory: Path) -> list[tuple[int, Path]]:
    """All directories with a checkpoint's name, committed or damaged, newest step first."""
    try:
        entries = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(((int(match[1]), path) for path in entries if (match := _NAME.fullmatch(path.name))), reverse=True)


def newest(directory: Path) -> Checkpoint | None:
    """The committed checkpoint with the highest step, or None."""
    checkpoints = committed(directory)
    return checkpoints[-1] if checkpoints else None


def is_pinned(path: Path) -> bool:
    return (path / PINNED).exists()


def pin(path: Path, *, why: str) -> bool:
    """Pin a checkpoint. Returns False if it was already pinned.

    Raises:
        OSError: the checkpoint's directory is not writable.
    """
    if is_pinned(path):
        return False
    write_json(path / PINNED, {"why": why, "time": time.time()})
    return True


def unpin(path: Path) -> bool:
    """Remove a checkpoint's pin. Returns False if there was none.

    Raises:
        OSError: the checkpoint's directory is not writable.
    """
    try:
        (path / PINNED).unlink()
    except FileNotFoundError:
        return False
    return True
