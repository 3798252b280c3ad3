"""The ``hpcaccel`` program: registers the commands, and turns errors into messages and exit codes.

Typer's rich help is off: it would double the run time of ``hpcaccel --help``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import hpcaccel
from hpcaccel.cli.command_table import COMMANDS, GROUPS, NOT_OURS
from hpcaccel.cli.output import EXIT_INTERRUPTED, note, os_error_message, show_message
from hpcaccel.cli.quick import COMPLETION_VARIABLE, EXIT_BROKEN_PIPE, is_root_help
from hpcaccel.cli.remote.forward import COMMAND_LINE, forwarded
from hpcaccel.cli.root_help import ABOUT, VERSION_HELP, root_page
from hpcaccel.core.progress_notes import SHOW_NOTE
from hpcaccel.errors import HpcaccelError, SpecError, UserError

__all__ = ["main", "program"]


class Commands(TyperGroup):
    """The root command. Turns errors into a message and an exit code; unexpected exceptions keep their traceback."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(root_page(formatter.width))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in NOT_OURS:
            raise UserError(f"hpcaccel has no command {args[0]!r}: {NOT_OURS[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        COMMAND_LINE.set((*ctx._protected_args, *ctx.args))
        SHOW_NOTE.set(lambda sentence: note(f"note: {sentence}"))
        try:
            _leave_removed_directory([*ctx._protected_args, *ctx.args])
            return super().invoke(ctx)
        except SpecError as error:
            _fail(error.problems, error.exit_code, hints=error.hints)
        except HpcaccelError as error:
            _fail([str(error)], error.exit_code)
        except BrokenPipeError:
            # The reader has closed the pipe (`| head`). The interpreter must not write to it at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except OSError as error:
            if (why := os_error_message(error)) is None:
                raise
            _fail([why], UserError.exit_code)


WITHOUT_DIRECTORY = {
    "status",
    "list",
    "wait",
    "explain",
    "report",
    "stop",
    "save",
    "profile",
    "resume",
    "cancel",
    "stacks",
    "logs",
    "shell",
}
"""Commands that work even if the current directory has been removed."""


def _leave_removed_directory(command: list[str]) -> None:
    """If the current directory has been removed, change to ``/``. Raise UserError if ``command`` needs a current
    directory."""
    try:
        os.getcwd()
    except FileNotFoundError:
        about_runs = command[:1] == ["sweep"] and command[1:2] != ["start"]
        if not (about_runs or set(command[:1]) <= WITHOUT_DIRECTORY):
            raise UserError("the current directory no longer exists: change to another one") from None
        os.chdir("/")


def _fail(messages: list[str], exit_code: int, *, hints: list[str] | None = None) -> NoReturn:
    for message in messages:
        show_message("error", message, colour="red")
    for hint in hints or []:
        show_message("hint", hint, colour="cyan")
    raise typer.Exit(exit_code) from None


class Program(typer.Typer):
    """The root app. It has only the commands that a command line needs: building all of them takes long."""

    def add(self, name: str) -> None:
        """Add the command or the group ``name``."""
        if name in GROUPS:
            self.add_typer(import_module(f"hpcaccel.cli.{name}").app, name=name, help=GROUPS[name])
            return
        entry = COMMANDS[name]
        module = import_module(f"hpcaccel.cli.{entry.module}")
        function = getattr(module, entry.attribute)
        if entry.effect is not None:
            function = forwarded([name], function, effect=entry.effect)
        cls = None if entry.cls is None else getattr(module, entry.cls)
        self.command(name, cls=cls, hidden=entry.hidden)(function)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hpcaccel {hpcaccel.__version__}")
        raise typer.Exit()


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help=VERSION_HELP)
    ] = False,
) -> None:
    pass


def program(names: Iterable[str] = (*COMMANDS, *GROUPS)) -> Program:
    """The program with these commands and groups; by default all."""
    made = Program(
        name="hpcaccel",
        cls=Commands,
        help=ABOUT,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_options)
    for name in names:
        made.add(name)
    return made


def program_for(command_line: Sequence[str]) -> Program:
    """The program with what ``command_line`` (without the program's name) needs."""
    if COMPLETION_VARIABLE in os.environ:
        return program()
    if not command_line or is_root_help(command_line):
        return program([])
    first = command_line[0]
    runs_others = first == "answer"
    return program() if runs_others or first not in (*COMMANDS, *GROUPS) else program([first])


def main(command_line: Sequence[str] | None = None) -> None:
    program_for(sys.argv[1:] if command_line is None else command_line)(command_line, prog_name="hpcaccel")
