"""The ``hpcaccel`` program: its commands, and how it ends when something goes wrong.

Typer's rich help is off: it would double the time that ``hpcaccel --help`` takes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import hpcaccel
from hpcaccel.cli import (
    checkpoint,
    clean,
    cluster_commands,
    control,
    explain,
    init,
    logs,
    plan,
    pull,
    report,
    run,
    runs,
    shell,
    spec,
    stacks,
    submit,
    sweep,
)
from hpcaccel.cli.output import note, show_message, the_machines_no
from hpcaccel.cli.remote import server
from hpcaccel.cli.remote.forward import COMMAND_LINE, Effect, forwarded
from hpcaccel.cli.root_help import NOT_OURS, write_commands, write_examples
from hpcaccel.core.progress_notes import ON_SILENCE
from hpcaccel.errors import HpcaccelError, SpecError, UserError

__all__ = ["app"]

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 128 + 13
"""What a shell reports for a program that SIGPIPE ended."""


class Commands(TyperGroup):
    """Turns the errors that we raise on purpose into one message and an exit code; bugs keep their traceback."""

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
        ON_SILENCE.set(lambda sentence: note(f"note: {sentence}"))
        try:
            _leave_a_folder_that_has_gone([*ctx._protected_args, *ctx.args])
            return super().invoke(ctx)
        except SpecError as error:
            _fail(error.problems, error.exit_code, hints=error.hints)
        except HpcaccelError as error:
            _fail([str(error)], error.exit_code)
        except BrokenPipeError:
            # The reader has left (`| head`). Nothing more can be said; the interpreter must not try it at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except OSError as error:
            if (why := the_machines_no(error)) is None:
                raise
            _fail([why], UserError.exit_code)


WITHOUT_A_FOLDER = {
    "status",
    "list",
    "wait",
    "explain",
    "report",
    "stop",
    "resume",
    "cancel",
    "stacks",
    "logs",
    "shell",
}
"""Commands about runs, which are found from anywhere."""


def _leave_a_folder_that_has_gone(command: list[str]) -> None:
    """Raises UserError where the current directory does not exist any more, and the command needs one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        about_runs = command[:1] == ["sweep"] and command[1:2] != ["start"]
        if not (about_runs or set(command[:1]) <= WITHOUT_A_FOLDER):
            raise UserError("the current directory does not exist any more: change into another one") from None
        os.chdir("/")


def _fail(messages: list[str], exit_code: int, *, hints: list[str] | None = None) -> NoReturn:
    for message in messages:
        show_message("error", message, colour="red")
    for hint in hints or []:
        show_message("hint", hint, colour="cyan")
    raise typer.Exit(exit_code) from None


app = typer.Typer(
    name="hpcaccel",
    cls=Commands,
    help="From one YAML file to a model trained, preempted and resumed on a Slurm cluster.",
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
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
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
    logs.logs,
    pull.pull,
    shell.shell,
):
    app.command(command.__name__.rstrip("_"))(command)

_EFFECTS: dict[Callable[..., None], Effect] = {
    runs.status: "reads",
    runs.list_: "reads",
    runs.wait: "follows",
    explain.explain: "reads",
    clean.clean: "changes",
    report.report: "reads",
    control.stop: "changes",
    control.resume: "changes",
    control.cancel: "changes",
    stacks.stacks: "changes",
}
for asked, effect in _EFFECTS.items():
    named = asked.__name__.rstrip("_")
    app.command(named)(forwarded([named], asked, effect=effect))

app.command("answer", hidden=True)(server.answer)

app.add_typer(cluster_commands.app, name="cluster")
app.add_typer(sweep.app, name="sweep")
app.add_typer(checkpoint.app, name="checkpoint")
