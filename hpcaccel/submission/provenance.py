"""Where a run came from: enough to tell, months later, what exactly ran."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["SENT_COMMIT", "SENT_FROM", "GitState", "git_state", "packages", "submitted_from"]

SENT_COMMIT, SENT_FROM = "HPCACCEL_SENT_COMMIT", "HPCACCEL_SENT_FROM"
"""What another machine says of the code that it sent: its commit (with + behind it for changes), and who and where."""


@dataclass(frozen=True)
class GitState:
    commit: str
    dirty: bool
    """Whether tracked files differ from the commit, or untracked ones lie beside them."""


def git_state(folder: Path, *, runs_dir: Path | None = None) -> GitState | None:
    """The commit that ``folder`` is at, ``runs_dir`` disregarded; None outside of git, or before a first commit.

    For code that was sent here from another machine: as that one said.
    """
    if (sent := os.environ.get(SENT_COMMIT)) is not None:
        return GitState(sent.rstrip("+"), sent.endswith("+")) if sent else None
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    places = ["."]
    if runs_dir is not None and runs_dir != folder and runs_dir.is_relative_to(folder):
        places.append(f":(exclude){runs_dir.relative_to(folder).as_posix()}")
    return GitState(commit.strip(), bool(_git(folder, "status", "--porcelain", "--", *places)))


def _git(folder: Path, *words: str) -> str | None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            # no index refresh: a question must not take the lock that the user's own git may need
            ["git", "--no-optional-locks", "-C", str(folder), *words],
            capture_output=True, check=True, encoding="utf-8", errors="replace", env=environment,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def packages() -> dict[str, str]:
    """Version of every installed distribution of this Python, by name."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a half-removed package has none
            found[name] = distribution.version
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def submitted_from() -> str:
    """``user@host:/directory``"""
    if (sent := os.environ.get(SENT_FROM)) is not None:
        return sent
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}:{os.getcwd()}"
