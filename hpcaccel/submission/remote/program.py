"""The line for the login shell of the other side: a few fixed words, whatever is asked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

__all__ = ["INSTALLED", "answering", "command_line", "in_login_shell"]

INSTALLED = "~/.local/share/hpcaccel/env/bin/hpcaccel"
"""Where ``cluster install`` puts it."""

_VARIABLE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


def in_login_shell(line: str) -> str:
    """``line``, in bash and with what the site's login scripts set up: modules and the path of Slurm.

    What those scripts read would be ours, so that they get no stdin.
    """
    return shlex.join(["bash", "-c", f"exec 3<&0; exec bash -lc {shlex.quote('exec 0<&3 3<&-; ' + line)} < /dev/null"])


def command_line(args: Sequence[str]) -> str:
    return in_login_shell("exec " + shlex.join(args))


def answering(program: str | None, *args: str) -> str:
    """hpcaccel on the other side, with ``args``.

    Args:
        program: its path there, which may begin with ``~/`` and hold ``${env:NAME}``. None: where ``cluster install``
            puts it, else the first on PATH.
    """
    words = shlex.join(args)
    if program is not None:
        return in_login_shell(f"exec {_path(program)} {words}")
    return in_login_shell(f'p={_path(INSTALLED)}; [ -x "$p" ] || p=hpcaccel; exec "$p" {words}')


def _path(text: str) -> str:
    """A path as a shell word: quoted, but for the home and variables that are the other side's."""
    head, text = ('"$HOME"', text[1:]) if text.startswith("~/") else ("", text)
    words = []
    for index, piece in enumerate(_VARIABLE.split(text)):  # every second one is a variable's name
        words.append(f'"${{{piece}}}"' if index % 2 else shlex.quote(piece) if piece else "")
    return head + "".join(words)
