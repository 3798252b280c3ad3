"""pyxis, srun's container plugin: whether it is installed, and the mounts that it cannot make."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["is_installed", "unmountable"]

_SHELL_SIGNS = re.compile(r"""["$`\\]""")
"""Characters that bash interprets between double quotes."""


def is_installed(srun_help: str) -> bool:
    """Whether the output of ``srun --help`` has pyxis's option (https://github.com/NVIDIA/pyxis)."""
    return "--container-image" in srun_help


def unmountable(mounts: Iterable[str]) -> str | None:
    """Why pyxis cannot mount one of ``mounts`` (``SRC:DST[:FLAGS]``); None if it can mount all.

    pyxis writes each mount between double quotes into a bash script (pyxis_slurmstepd.c).
    """
    for mount in mounts:
        if found := _SHELL_SIGNS.search(mount):
            return (
                f"pyxis cannot mount {mount!r}: it does not escape paths in its shell script, and the path contains "
                f"{found[0]}"
            )
    return None
