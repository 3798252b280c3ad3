"""Command lines that need no command line library: completion, the help page, ``render`` with a file and overrides.

Importing Typer and building the parameters takes a fifth of the time of ``render``. A command line that cannot be
executed here without an error is left to Typer's program, which executes it from the beginning.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["COMPLETION_VARIABLE", "EXIT_BROKEN_PIPE", "is_root_help", "run_quickly"]

COMPLETION_VARIABLE = "_HPCACCEL_COMPLETE"
"""The shell sets this variable when it asks for completions."""
EXIT_BROKEN_PIPE = 128 + 13
"""Exit code that a shell reports for a program killed by SIGPIPE."""


def is_root_help(command_line: Sequence[str]) -> bool:
    """Whether ``command_line`` (without the program's name) asks for the root help page."""
    return list(command_line) in (["--help"], ["-h"])


def run_quickly(command_line: Sequence[str]) -> int | None:
    """Run ``command_line`` (without the program's name) if it is one of this module's.

    Returns:
        The exit code; None if the command line is not one of this module's or cannot be executed, and nothing has been
        printed.
    """
    if COMPLETION_VARIABLE in os.environ:
        return _complete(os.environ[COMPLETION_VARIABLE])
    if is_root_help(command_line):
        from hpcaccel.cli.root_help import page_columns, root_page

        return _print(root_page(page_columns()), if_closed=1)
    command, *words = command_line or [""]
    if command != "render" or not words or any(word.startswith("-") for word in words):
        return None
    try:
        text = _rendered(words)
    except Exception:  # Typer's program reports it
        return None
    return None if text is None or "\x1b" in text else _print(text, if_closed=EXIT_BROKEN_PIPE)


def _complete(request: str) -> int | None:
    """Print completions for the shell. Nothing is printed after an error: the shell would show it inside the line."""
    from hpcaccel.cli.completion import completed_for_shell

    try:
        completed = completed_for_shell(request, os.environ)
    except (OSError, ValueError, KeyError):
        return 1
    if completed is None:
        return None
    code, text = completed
    return _print(f"{text}\n", if_closed=EXIT_BROKEN_PIPE) or code


def _rendered(words: Sequence[str]) -> str | None:
    """The output of ``hpcaccel render FILE [KEY=VALUE]...``; None if the default cluster is behind SSH."""
    from pathlib import Path

    from hpcaccel.cli.rendered_scripts import chosen_profile, rendered_scripts

    file, *overrides = words
    if not os.path.isfile(file):  # missing, or a pipe, which can be read only once
        return None
    profile = chosen_profile(None)
    if profile is not None and profile.host is not None:
        return None
    return "".join(rendered_scripts(Path(file), overrides, profile))


def _print(text: str, *, if_closed: int) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). The interpreter must not write to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return if_closed
    return 0
