"""The origin of a run: git commit, installed packages, and who submitted it from where."""

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
"""Environment variables that are set for code from another machine: the git commit of the code, with a trailing + if
there are uncommitted changes; and the ``user@host:/directory`` from which the run was submitted."""


@dataclass(frozen=True)
class GitState:
    commit: str
    dirty: bool
    """Whether tracked files differ from the commit, or untracked files exist."""


def git_state(folder: Path, *, runs_dir: Path | None = None) -> GitState | None:
    """The git state of ``folder``, ignoring changes in ``runs_dir``; None if there is no git or no commit.

    For code from another machine, this is the state on that machine.
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


def _git(folder: Path, *args: str) -> str | None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            # no index refresh: a query must not take the lock that the user's own git may need
            ["git", "--no-optional-locks", "-C", str(folder), *args],
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
        if name:  # a partly removed package has no name
            found[name] = distribution.version
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def submitted_from() -> str:
    """The origin of the submission, as ``user@host:/directory``."""
    if (sent := os.environ.get(SENT_FROM)) is not None:
        return sent
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in a container
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}:{os.getcwd()}"
