"""The ``hpcaccel`` program: registers the commands, and turns errors into messages and exit codes.

Typer's rich help is off: it would double the run time of ``hpcaccel --help``.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from copy import copy
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.models import CommandInfo, TyperInfo

import hpcaccel
from hpcaccel.cli import (
    checkpoint,
    cluster,
    config,
    estimate_memory,
    init,
    launch,
    plan,
    ranks,
    run,
    runs,
    selftest,
    spec,
    steer,
    submit,
    sweep,
)
from hpcaccel.cli.output import EXIT_INTERRUPTED, note, os_error_message, show_message
from hpcaccel.cli.remote import server
from hpcaccel.cli.remote.forward import COMMAND_LINE, Effect, forwarded
from hpcaccel.cli.root_help import NOT_OURS, write_commands, write_examples
from hpcaccel.core.progress_notes import SHOW_NOTE
from hpcaccel.errors import HpcaccelError, SpecError, UserError

__all__ = ["app"]

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
    """The root app. Builds only the commands that a command line needs: building all takes longer than many run."""

    def __call__(self, args: Sequence[str] | None = None, **options: Any) -> Any:
        return super(Program, self._reduced_for(sys.argv[1:] if args is None else args)).__call__(args, **options)

    def _reduced_for(self, command_line: Sequence[str]) -> Program:
        """A copy with the one command that is named; for the help page, with all commands without their parameters."""
        if COMPLETION_VARIABLE in os.environ or list(command_line[:1]) == ["answer"]:  # it runs the other commands
            return self
        reduced = copy(self)
        if not command_line or list(command_line) in (["--help"], ["-h"]):
            groups = [CommandInfo(group.name, help=_group_help(group)) for group in self.registered_groups]
            reduced.registered_commands = [_without_parameters(info) for info in (*self.registered_commands, *groups)]
            reduced.registered_groups = []
            return reduced
        reduced.registered_commands = [info for info in self.registered_commands if info.name == command_line[0]]
        reduced.registered_groups = [group for group in self.registered_groups if group.name == command_line[0]]
        return reduced if reduced.registered_commands or reduced.registered_groups else self


def _without_parameters(info: CommandInfo) -> CommandInfo:
    def summarized() -> None:
        pass

    text = inspect.getdoc(info.callback) if info.help is None else info.help
    return CommandInfo(info.name, callback=summarized, help=text, hidden=info.hidden)


def _group_help(group: TyperInfo) -> str:
    return str(group.typer_instance.info.help) if group.typer_instance is not None else ""


app = Program(
    name="hpcaccel",
    cls=Commands,
    help="Train on a Slurm cluster from one YAML file, with exact resume after preemption.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hpcaccel {hpcaccel.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (
    init.init,
    spec.schema,
    spec.validate,
    spec.render,
    plan.plan,
    submit.submit,
    run.run,
    ranks.logs,
    runs.plot,
    steer.pull,
    ranks.shell,
    config.env,
):
    app.command(command.__name__.rstrip("_"))(command)

_EFFECTS: dict[Callable[..., None], Effect] = {
    runs.status: "reads",
    runs.list_: "reads",
    runs.wait: "follows",
    runs.explain: "reads",
    steer.clean: "changes",
    runs.report: "reads",
    steer.stop: "changes",
    steer.save: "changes",
    steer.resume: "changes",
    steer.cancel: "changes",
    ranks.stacks: "changes",
}
for function, effect in _EFFECTS.items():
    name = function.__name__.rstrip("_")
    app.command(name)(forwarded([name], function, effect=effect))

app.command("launch", cls=launch.LaunchCommand)(launch.launch)
app.command("test")(selftest.selftest)
app.command("estimate-memory")(estimate_memory.estimate_memory)
app.command("answer", hidden=True)(server.answer)

app.add_typer(cluster.app, name="cluster")
app.add_typer(sweep.app, name="sweep")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(config.app, name="config")
