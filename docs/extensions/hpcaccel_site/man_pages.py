"""Man pages in roff: one for the program, and one for each command and each group with its commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from hpcaccel.cli.root_help import ABOUT, EXAMPLES, OPTIONS, SECTIONS
from hpcaccel_site.command_reference import commands

__all__ = ["man_pages"]

EXIT_CODES = (
    ("0", "completed"),
    ("1", "the run failed"),
    ("2", "the command, a file or a value is wrong"),
    ("85", "the run was stopped and can be resumed"),
    ("130", "cancelled or interrupted"),
)


def man_pages() -> dict[str, str]:
    """The pages by name: ``hpcaccel``, ``hpcaccel-submit``. Without a date, they change with the code only."""
    pages: dict[str, list[str]] = {}
    for name, command, context in commands():
        _, first, *_ = name.split(" ")
        lines = pages.setdefault(f"hpcaccel-{first}", [])
        is_first = not lines
        if is_first:
            about = " ".join((command.help or "").split("\n\n")[0].split()).rstrip(".")
            lines += [_title(f"hpcaccel-{first}"), ".SH NAME", rf"hpcaccel-{first} \- {_text(about)}"]
        lines += _command(name, command, context, is_first=is_first)
    made = {name: "\n".join([*lines, *_exit_codes(), *_see_also("hpcaccel")]) + "\n" for name, lines in pages.items()}
    return {"hpcaccel": "\n".join(_root()) + "\n", **made}


def _title(name: str) -> str:
    return f'.TH "{name.upper()}" "1" "" "hpcaccel" "User Commands"'


def _root() -> Iterator[str]:
    yield from (_title("hpcaccel"), ".SH NAME", rf"hpcaccel \- {_text(ABOUT.rstrip('.'))}")
    yield from (".SH SYNOPSIS", r"\fBhpcaccel\fP [OPTIONS] COMMAND [ARGS]...", ".SH OPTIONS")
    for option, about in OPTIONS:
        yield from _item(option, about)
    abouts = {name: command.help or "" for name, command, _ in commands()}
    for title, names in SECTIONS.items():
        yield f".SH {title.upper()}"
        for name in names:
            yield from _item(rf"hpcaccel-{name}(1)", abouts[f"hpcaccel {name}"].split("\n\n")[0])
    yield ".SH EXAMPLES"
    for example, about in EXAMPLES:
        yield from _item(example, about)
    yield from _exit_codes()
    yield from _see_also("sbatch", "squeue", "srun")


def _command(name: str, command: Any, context: Any, *, is_first: bool) -> Iterator[str]:
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    heading = ".SH" if is_first else ".SS"
    yield from ([".SH SYNOPSIS"] if is_first else [f'.SH "{name.upper()}"'])
    yield rf"\fB{_text(name)}\fP{_text(usage.removeprefix(name))}"
    if is_first:
        yield ".SH DESCRIPTION"
    else:
        yield ".PP"
    paragraphs = [" ".join(one.split()) for one in inspect.cleandoc(command.help or "").split("\n\n")]
    for number, paragraph in enumerate(one for one in paragraphs if one):
        yield from ([".PP"] if number else [])
        yield _text(paragraph)
    records = [
        record
        for parameter in command.get_params(context)
        if "--help" not in parameter.opts and (record := parameter.get_help_record(context)) is not None
    ]
    if records:
        yield f"{heading} OPTIONS" if is_first else ".PP"
    for spelling, meaning in records:
        yield from _item(re.sub(r" <[^<>]+>$", "", " ".join(spelling.split())), meaning)


def _item(term: str, about: str) -> tuple[str, str, str]:
    return ".TP", rf"\fB{_text(term)}\fP", _text(" ".join(about.split())) or r"\&"


def _exit_codes() -> Iterator[str]:
    yield '.SH "EXIT STATUS"'
    for code, about in EXIT_CODES:
        yield from _item(code, about)


def _see_also(*names: str) -> Iterator[str]:
    yield from ('.SH "SEE ALSO"', ", ".join(rf"\fB{name}\fP(1)" for name in names))
    yield from (".PP", r"\fBhpcaccel docs\fP lists the pages of the documentation, and shows them in the terminal.")


def _text(text: str) -> str:
    """Plain text for roff: nothing in it is a request or an escape, and hyphens are those of options."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("`", "")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped
