"""What a checkpoint directory looks like, without torch.

``checkpoints/step_00001200/`` is a committed checkpoint when it holds a readable ``COMMITTED`` manifest. Everything
is first written to ``checkpoints/.step_00001200.<attempt>.tmp/`` and renamed when it is complete, so a directory of
the final name without its manifest is damaged, never unfinished.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "MANIFEST",
    "PINNED",
    "PUT_ASIDE",
    "QUARANTINED",
    "SUPERSEDED",
    "Checkpoint",
    "attempt_of",
    "checkpoint_name",
    "committed",
    "newest",
    "read_manifest",
    "step_directories",
    "step_of",
    "temporary_name",
]

MANIFEST = "COMMITTED"
PINNED = "PINNED"
"""Beside the manifest: never delete this checkpoint. What is in it is for people."""
QUARANTINED, SUPERSEDED = PUT_ASIDE = ("quarantined", "superseded")
"""In front of the names of directories that are no checkpoints any more: damaged, or of a course that was given up."""

_NAME = re.compile(r"step_(\d{8,})$")
_TEMPORARY = re.compile(r"\.step_\d{8,}\.(\d+)\.tmp")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its directory, its optimizer step and its manifest as it was read."""

    path: Path
    step: int
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.name


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint directory of this name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def temporary_name(step: int, attempt: int | str) -> str:
    return f".{checkpoint_name(step)}.{attempt}.tmp"


def attempt_of(name: str) -> int | None:
    """The attempt that made a temporary directory of this name; None for any other name."""
    match = _TEMPORARY.fullmatch(name)
    return int(match[1]) if match else None


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint directory, or None where there is none that can be read."""
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
