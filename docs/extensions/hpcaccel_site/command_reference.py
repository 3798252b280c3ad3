"""The commands of the program: synopsis, arguments and options, made from the commands themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from hpcaccel.cli.main import program
from hpcaccel_site.markdown import code, plain, table

__all__ = ["commands", "commands_page"]


def commands() -> Iterator[tuple[str, Any, Any]]:
    """All public commands and groups, in the order of the program: name, command and context."""
    root = typer.main.get_command(program())
    yield from _below(root, typer.Context(root, info_name="hpcaccel"))


def _below(group: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        inner = typer.Context(command, info_name=name, parent=context)
        yield inner.command_path, command, inner
        if hasattr(command, "commands"):
            yield from _below(command, inner)


def commands_page() -> str:
    """Markdown: a section for each command."""
    return "\n".join(_section(name, command, context) for name, command, context in commands())


def _section(name: str, command: Any, context: Any) -> str:
    level = "#" * (name.count(" ") + 1)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"{level} {name}\n", _prose(command.help or ""), f"```text\n{usage}\n```\n"]
    rows = [(code(spelling), plain(meaning)) for spelling, meaning in _records(command, context)]
    if rows:
        parts.append(table(("argument or option", "meaning"), rows))
    return "\n".join(parts)


def _prose(text: str) -> str:
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(plain(one) for one in paragraphs if one.strip()) + "\n"


def _records(command: Any, context: Any) -> Iterator[tuple[str, str]]:
    """Spelling and meaning of each argument and option, as ``--help`` shows them."""
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            spelling = " ".join(record[0].split())
            yield re.sub(r" <[^<>]+>$", "", spelling), record[1]  # the type of an argument
