"""The ``hpcaccel`` program: registers the commands, and turns errors into messages and exit codes.

Typer's rich help is off: it would double the run time of ``hpcaccel --help``.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Sequence
from copy import copy
from importlib import import_module
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup
from typer.models import CommandInfo, TyperInfo

import hpcaccel
from hpcaccel.cli.output import EXIT_INTERRUPTED, note, os_error_message, show_message
from hpcaccel.cli.remote.forward import COMMAND_LINE, Effect, forwarded
from hpcaccel.cli.root_help import NOT_OURS, write_commands, write_examples
from hpcaccel.core.progress_notes import SHOW_NOTE
from hpcaccel.errors import HpcaccelError, SpecError, UserError

__all__ = ["main", "program"]

EXIT_BROKEN_PIPE = 128 + 13
"""Exit code that a shell reports for a program killed by SIGPIPE."""


COMPLETION_VARIABLE = "_HPCACCEL_COMPLETE"
"""The shell sets this variable when it asks for completions."""


class Commands(TyperGroup):
    """The root command. Turns errors into a message and an exit code; unexpected exceptions keep their traceback."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        write_commands(self.commands, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(formatter)

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


class CommandSource(NamedTuple):
    """Where a command is defined."""

    module: str
    """Module of ``hpcaccel.cli``. It is imported when the command is needed."""
    attribute: str
    effect: Effect | None = None
    """If not None, the command is forwarded to the cluster of its run; see ``forward``."""
    hidden: bool = False
    cls: str | None = None
    """Class of the command in ``module``, if it is not Typer's."""


COMMANDS = {
    "init": CommandSource("init", "init"),
    "schema": CommandSource("spec", "schema"),
    "validate": CommandSource("spec", "validate"),
    "render": CommandSource("spec", "render"),
    "plan": CommandSource("plan", "plan"),
    "submit": CommandSource("submit", "submit"),
    "run": CommandSource("run", "run"),
    "logs": CommandSource("ranks", "logs"),
    "plot": CommandSource("runs", "plot"),
    "pull": CommandSource("steer", "pull"),
    "shell": CommandSource("ranks", "shell"),
    "env": CommandSource("config", "env"),
    "notify": CommandSource("notify", "notify"),
    "status": CommandSource("runs", "status", "reads"),
    "list": CommandSource("runs", "list_", "reads"),
    "top": CommandSource("top", "top"),
    "wait": CommandSource("runs", "wait", "follows"),
    "explain": CommandSource("runs", "explain", "reads"),
    "clean": CommandSource("steer", "clean", "changes"),
    "report": CommandSource("report", "report"),
    "stop": CommandSource("steer", "stop", "changes"),
    "save": CommandSource("steer", "save", "changes"),
    "profile": CommandSource("profile", "profile", "changes"),
    "mcp": CommandSource("mcp", "mcp"),
    "resume": CommandSource("steer", "resume", "changes"),
    "cancel": CommandSource("steer", "cancel", "changes"),
    "stacks": CommandSource("ranks", "stacks", "changes"),
    "serve": CommandSource("serve", "serve"),
    "launch": CommandSource("launch", "launch", cls="LaunchCommand"),
    "test": CommandSource("selftest", "selftest"),
    "estimate-memory": CommandSource("estimate_memory", "estimate_memory"),
    "answer": CommandSource("remote.server", "answer", hidden=True),
}
GROUPS = ("cluster", "sweep", "checkpoint", "config")
"""Groups of commands: the ``app`` of the module of ``hpcaccel.cli`` with the same name."""


class Program(typer.Typer):
    """The root app. It has only the commands that a command line needs: building all takes longer than many run."""

    def add(self, name: str) -> None:
        """Add the command or the group ``name``."""
        if name in GROUPS:
            self.add_typer(import_module(f"hpcaccel.cli.{name}").app, name=name)
            return
        entry = COMMANDS[name]
        module = import_module(f"hpcaccel.cli.{entry.module}")
        function = getattr(module, entry.attribute)
        if entry.effect is not None:
            function = forwarded([name], function, effect=entry.effect)
        cls = None if entry.cls is None else getattr(module, entry.cls)
        self.command(name, cls=cls, hidden=entry.hidden)(function)

    def without_parameters(self) -> Program:
        """A copy for the help page: all commands and groups, without their parameters and commands."""
        reduced = copy(self)
        groups = [CommandInfo(group.name, help=_group_help(group)) for group in self.registered_groups]
        reduced.registered_commands = [_without_parameters(info) for info in (*self.registered_commands, *groups)]
        reduced.registered_groups = []
        return reduced


def _without_parameters(info: CommandInfo) -> CommandInfo:
    def summarized() -> None:
        pass

    text = inspect.getdoc(info.callback) if info.help is None else info.help
    return CommandInfo(info.name, callback=summarized, help=text, hidden=info.hidden)


def _group_help(group: TyperInfo) -> str:
    return str(group.typer_instance.info.help) if group.typer_instance is not None else ""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hpcaccel {hpcaccel.__version__}")
        raise typer.Exit()


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def program(names: Iterable[str] = (*COMMANDS, *GROUPS)) -> Program:
    """The program with these commands and groups; by default all."""
    made = Program(
        name="hpcaccel",
        cls=Commands,
        help="Train on a Slurm cluster from one YAML file, with exact resume after preemption.",
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
    if not command_line or list(command_line) in (["--help"], ["-h"]):
        return program().without_parameters()
    first = command_line[0]
    runs_others = first == "answer"
    return program() if runs_others or first not in (*COMMANDS, *GROUPS) else program([first])


def main(command_line: Sequence[str] | None = None) -> None:
    program_for(sys.argv[1:] if command_line is None else command_line)(command_line, prog_name="hpcaccel")
