"""The three ways in which a value is written into a batch script, each so that it arrives byte for byte.

What cannot be written is refused: a line break would begin a new line of the script, and a NUL ends a value.
"""

from __future__ import annotations

import re
import shlex

from hpcaccel.errors import SpecError

__all__ = ["checked", "comment", "directive", "pattern", "shell"]

_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+-]+", re.ASCII)


def checked(value: object) -> str:
    """The text of a value that fits on one line.

    Raises:
        SpecError: it does not, or it is no text at all.
    """
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise SpecError(f"{value!r} cannot be written into a batch script: only text and numbers can")
    text = str(value)
    found = re.search(r"[\0\n\r\ud800-\udfff]", text)
    if found is None:
        return text
    what = {"\0": "a NUL character", "\n": "a line break", "\r": "a carriage return"}.get(found[0], "no valid text")
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    raise SpecError(f"{shown!r} holds {what}, and a batch script cannot: write the value on one line")


def shell(value: object) -> str:
    """A word of the shell's."""
    return shlex.quote(checked(value))


def directive(value: object) -> str:
    """The value of an option on an ``#SBATCH`` line.

    sbatch cuts these lines into words itself: quotes keep blanks and ``#``, a backslash takes the next character as it
    is, inside of quotes of either kind too, and nothing is expanded (tried on 22.05).
    """
    text = checked(value)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def comment(value: object) -> str:
    """Text behind ``# ``. It is for people, so a line break becomes a blank."""
    text = str(value).encode("utf-8", "replace").decode()
    return re.sub(r"[\0-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)


def pattern(path: str) -> str:
    """A path for ``--output``, where Slurm replaces ``%j`` and the like, with its per cents meant as such.

    Raises:
        SpecError: it holds a backslash, which Slurm takes out of such a path.
    """
    if "\\" in path:
        raise SpecError(f"the run directory {path!r} holds a backslash, which Slurm cannot have there: use another")
    return checked(path).replace("%", "%%")
