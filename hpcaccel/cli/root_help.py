"""The page that ``hpcaccel --help`` prints: options, the commands in sections with their full summaries, examples.

It is written without Typer and without importing the commands: importing them takes ten times as long.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType

from hpcaccel.cli.command_table import COMMANDS, GROUPS, CommandSource

__all__ = ["ABOUT", "OPTIONS", "SECTIONS", "VERSION_HELP", "page_columns", "root_page"]

ABOUT = "Train on a Slurm cluster from one YAML file, with exact resume after preemption."
VERSION_HELP = "Print the version and exit."

OPTIONS = (
    ("--version", VERSION_HELP),
    ("--install-completion", "Install completion for the current shell."),
    ("--show-completion", "Show completion for the current shell, to copy it or customize the installation."),
    ("-h, --help", "Show this message and exit."),
)
"""The options before the command."""

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Submit": ("init", "schema", "validate", "render", "plan", "estimate-memory", "submit", "run"),
    "Launch": ("launch", "config", "env"),
    "Watch": ("status", "list", "top", "logs", "wait", "explain", "report", "plot", "stacks", "shell", "serve", "mcp"),
    "Steer": ("stop", "save", "profile", "resume", "cancel", "pull", "clean"),
    "Sweep": ("sweep",),
    "Cluster": ("cluster", "test", "notify"),
    "Checkpoint": ("checkpoint",),
    "Help": ("docs",),
}
"""The sections of the root page: a title, and its commands."""

TRAINING = "Training"
TRAINING_LINES = (
    ("from hpcaccel import Accelerator", "In the training script, with your own loop: see docs/training.md."),
    ("hpcaccel.submit(function, ...)", "Submit from Python: see docs/functions.md."),
)

EXAMPLES = (
    ("hpcaccel init train.py", "write job.yaml"),
    ("hpcaccel submit job.yaml --wait", "submit, and follow the run"),
    ("hpcaccel submit job.yaml slurm.nodes=4 args.lr=1e-3", "with other values"),
    ("hpcaccel submit job.yaml --grid args.lr=1e-3,3e-4", "an array, one run per value"),
    ("hpcaccel logs -f gpt", "follow the output of the latest run named gpt"),
    ("hpcaccel sweep start sweep.yaml", "search hyperparameters"),
)

_WIDEST_COLUMN = 52
"""Width in characters up to which a first column is as wide as its longest entry."""


def page_columns() -> int:
    """Width of a help page in characters, as Typer computes it for other pages."""
    return max(min(shutil.get_terminal_size().columns, 80) - 2, 50)


def root_page(width: int) -> str:
    """The page, with lines of at most ``width`` characters. Commands that are in no section come under ``Other``."""
    with_docstrings = sys.flags.optimize < 2
    shown = {name: entry for name, entry in COMMANDS.items() if not entry.hidden}
    left = {name: _summary(entry) if with_docstrings else "" for name, entry in shown.items()} | dict(GROUPS)
    sections: dict[str, tuple[tuple[str, str], ...]] = {"Options": OPTIONS}
    for title, names in SECTIONS.items():
        sections[title] = tuple((name, left.pop(name)) for name in names if name in left)
    sections |= {"Other": tuple(left.items()), TRAINING: TRAINING_LINES, "Examples": EXAMPLES}
    about = textwrap.fill(ABOUT, width, initial_indent="  ", subsequent_indent="  ")
    lines = ["Usage: hpcaccel [OPTIONS] COMMAND [ARGS]...", "", about]
    for title, rows in sections.items():
        if rows:
            lines += ["", f"{title}:", *_table(rows, width)]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Two columns, indented by two blanks; the second one is wrapped."""
    first = min(max(len(name) for name, _ in rows), _WIDEST_COLUMN) + 2
    for name, text in rows:
        head, *more = textwrap.wrap(text, max(width - first - 2, 10)) or [""]
        yield f"  {name:{first}}{head}"
        yield from (" " * (2 + first) + line for line in more)


def _summary(entry: CommandSource) -> str:
    """The first paragraph of a command's docstring."""
    function = next(code for code in _functions(entry.module) if code.co_name == entry.attribute)
    return " ".join(str(function.co_consts[0]).split("\n\n")[0].split())


@functools.cache
def _functions(module: str) -> list[CodeType]:
    """The compiled functions of a module of ``hpcaccel.cli``, which is not executed."""
    name = f"hpcaccel.cli.{module}"
    found = importlib.util.find_spec(name)
    code = found.loader.get_code(name)  # type: ignore[union-attr]
    return [one for one in code.co_consts if isinstance(one, CodeType)]
