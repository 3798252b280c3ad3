"""What processes of one run, or of several releases, agree on: numbers of versions and an exit code.

A module of its own, because ranks need only this of the records.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcaccel.errors import RunDirectoryError

__all__ = ["EXIT_CONTINUED", "PROTOCOL", "refuse_newer"]

PROTOCOL = 1
"""Version of the protocol between the batch step and the ranks, in ``HPCACCEL_PROTOCOL``."""

EXIT_CONTINUED = 85
"""Exit code of a process that stopped and is to be continued."""


def refuse_newer(value: Mapping[str, Any], newest: int, source: Path) -> None:
    """Refuse a file that a newer hpcaccel wrote in a format that this one cannot read.

    ``value`` is its contents, and ``newest`` the newest version that this release reads. Raises RunDirectoryError.
    """
    version = value.get("version", 1)
    if isinstance(version, int) and version > newest:
        raise RunDirectoryError(
            f"{source} has format version {version}, written by a newer hpcaccel; this one reads versions up to "
            f"{newest}. Upgrade hpcaccel"
        )
