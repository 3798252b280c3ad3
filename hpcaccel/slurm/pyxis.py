"""What the container plugin of srun cannot do."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["unmountable"]

_SHELL_SIGNS = re.compile(r"""["$`\\]""")


def unmountable(mounts: Iterable[str]) -> str | None:
    """Why one of ``mounts`` (``SRC:DST[:FLAGS]``) cannot be mounted; None where all can.

    pyxis writes each mount between double quotes into a script for bash (pyxis_slurmstepd.c).
    """
    for mount in mounts:
        if found := _SHELL_SIGNS.search(mount):
            return (
                f"{mount.split(':')[0]!r} cannot be mounted by pyxis, which gives its name to a shell as it is: it "
                f"holds {found[0]}"
            )
    return None
