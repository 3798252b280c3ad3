"""Output of commands: JSON on stdout, notes and errors on stderr."""

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

__all__ = [
    "EXIT_INTERRUPTED",
    "note",
    "os_error_message",
    "print_bytes",
    "print_json",
    "show_message",
    "terminal_columns",
]

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_USER_ERRORS = {
    errno.EACCES, errno.EDQUOT, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOSPC, errno.EPERM, errno.EROFS
}  # fmt: skip


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_bytes(*, out: bytes = b"", err: bytes = b"") -> None:
    """Print the output of a command that ran on a login node, without changing it."""
    for stream, text in ((sys.stderr, err), (sys.stdout, out)):
        stream.buffer.write(text)
        stream.flush()


def terminal_columns() -> int | None:
    """Width of the terminal on stdout; None if stdout is a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def note(message: str) -> None:
    """Print a message for the user on stderr, so that stdout has only the command's own output."""
    typer.echo(presentable(message), err=True)


def show_message(label: str, message: str, *, colour: str) -> None:
    """Print ``<label>: <message>`` on stderr; on a terminal, wrap it, and use colour unless NO_COLOR is set."""
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


def os_error_message(error: OSError) -> str | None:
    """A message for an operating system error that the user can fix; None for other errors, whose traceback is kept."""
    if error.errno not in _USER_ERRORS:
        return None
    return presentable(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror))
