"""How commands print."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import textwrap
from typing import Any

import typer

from hpcaccel.errors import presentable

__all__ = ["note", "print_bytes", "print_json", "show_message", "terminal_columns", "the_machines_no"]

_CAN_BE_MENDED = {
    errno.EACCES, errno.EDQUOT, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOSPC, errno.EPERM, errno.EROFS
}  # fmt: skip


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_bytes(*, out: bytes = b"", err: bytes = b"") -> None:
    """What a command has said on a login node, as it came."""
    for stream, text in ((sys.stderr, err), (sys.stdout, out)):
        stream.buffer.write(text)
        stream.flush()


def terminal_columns() -> int | None:
    """How wide the terminal is that a command prints to; None: it prints into a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def note(message: str) -> None:
    """Something for people: on stderr, so that stdout holds nothing but what was asked for."""
    typer.echo(presentable(message), err=True)


def show_message(label: str, message: str, *, colour: str) -> None:
    """``error: …`` on stderr; on a terminal in colour, and broken between words."""
    text = f"{label}: {message}"
    if not sys.stderr.isatty():
        typer.echo(text, err=True)
        return
    width = max(40, shutil.get_terminal_size().columns)
    lines = [
        textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    ]
    shown = "\n".join(lines)
    plain = "NO_COLOR" in os.environ
    head = f"{label}:" if plain else typer.style(f"{label}:", fg=colour, bold=True)
    typer.echo(head + shown.removeprefix(f"{label}:"), err=True, color=None if not plain else False)


def the_machines_no(error: OSError) -> str | None:
    """What the operating system refused and the user can mend; None: it is our bug, and keeps its traceback."""
    if error.errno not in _CAN_BE_MENDED:
        return None
    return presentable(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror))
