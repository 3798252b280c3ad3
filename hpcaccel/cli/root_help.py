"""The pages that ``--help`` prints: the commands in sections, each command with its full summary, and examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typer.core import TyperGroup

__all__ = ["NOT_OURS", "SECTIONS", "WholeSummaries", "write_commands", "write_examples"]

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Submit": ("init", "schema", "validate", "render", "plan", "estimate-memory", "submit", "run"),
    "Launch": ("launch", "config", "env"),
    "Watch": ("status", "list", "top", "logs", "wait", "explain", "report", "plot", "stacks", "shell", "serve", "mcp"),
    "Steer": ("stop", "save", "profile", "resume", "cancel", "pull", "clean"),
    "Sweep": ("sweep",),
    "Cluster": ("cluster", "test", "notify"),
    "Checkpoint": ("checkpoint",),
}
"""The sections of the root page: a title, and its commands."""

TRAINING = "Training"
TRAINING_LINES = (
    ("from hpcaccel import Accelerator", "In the training script, with your own loop: see docs/training.md."),
    ("hpcaccel.submit(function, ...)", "Submit from Python: see README.md."),
)

EXAMPLES = (
    ("hpcaccel init train.py", "write job.yaml"),
    ("hpcaccel submit job.yaml --wait", "submit, and follow the run"),
    ("hpcaccel submit job.yaml slurm.nodes=4 args.lr=1e-3", "with other values"),
    ("hpcaccel submit job.yaml --grid args.lr=1e-3,3e-4", "an array, one run per value"),
    ("hpcaccel logs -f gpt", "follow the output of the latest run named gpt"),
    ("hpcaccel sweep start sweep.yaml", "search hyperparameters"),
)

NOT_OURS: Mapping[str, str] = {
    "merge-weights": "`hpcaccel checkpoint convert SRC DST --to safetensors` merges a sharded checkpoint's weights",
}
"""Accelerate's commands that hpcaccel does not have, each with what to use instead."""


class WholeSummaries(TyperGroup):
    """A command group whose help shows the full summary of each command."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = [(name, _summary(command)) for name, command in self.commands.items() if not command.hidden]
        _write("Commands", shown, formatter)


def write_commands(commands: Mapping[str, Any], formatter: Any) -> None:
    """Write the commands that are not hidden, by section. Commands that are in no section come under ``Other``. Then
    write how to use hpcaccel from Python."""
    left = {name: command for name, command in commands.items() if not command.hidden}
    for title, names in SECTIONS.items():
        rows = [(name, _summary(left.pop(name))) for name in names if name in left]
        _write(title, rows, formatter)
    _write("Other", [(name, _summary(command)) for name, command in left.items()], formatter)
    _write(TRAINING, list(TRAINING_LINES), formatter)


def write_examples(formatter: Any) -> None:
    """Write the examples of the root page."""
    _write("Examples", list(EXAMPLES), formatter)


def _write(title: str, rows: list[tuple[str, str]], formatter: Any) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=52)


def _summary(command: Any) -> str:
    """The first paragraph of a command's help."""
    return " ".join((command.help or "").split("\n\n")[0].split())
