"""``hpcaccel --help``: the commands in the groups in which one needs them, each with its whole first sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typer.core import TyperGroup

__all__ = ["GROUPS", "NOT_OURS", "WholeSummaries", "write_commands", "write_examples"]

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Submit": ("init", "schema", "validate", "render", "plan", "submit", "run"),
    "Watch": ("status", "list", "logs", "wait", "explain", "report", "stacks", "shell"),
    "Steer": ("stop", "resume", "cancel", "pull", "clean"),
    "Sweep": ("sweep",),
    "Cluster": ("cluster",),
    "Checkpoint": ("checkpoint",),
}

TRAINING = "Training"
TRAINING_LINES = (
    ("from hpcaccel import Accelerator", "In the script, beside your own loop: docs/training.md."),
    ("hpcaccel.submit(function, ...)", "Submit from Python: see README.md."),
)

EXAMPLES = (
    ("hpcaccel init train.py", "write job.yaml"),
    ("hpcaccel submit job.yaml --wait", "train, and follow it"),
    ("hpcaccel submit job.yaml slurm.nodes=4 args.lr=1e-3", "with other values"),
    ("hpcaccel submit job.yaml --grid args.lr=1e-3,3e-4", "an array, one run each"),
    ("hpcaccel logs -f gpt", "what the newest run called gpt prints"),
    ("hpcaccel sweep start sweep.yaml", "search"),
)

NOT_OURS: Mapping[str, str] = {
    "launch": "ranks are started by `hpcaccel submit job.yaml`, by `hpcaccel run job.yaml` inside of an allocation, by "
    "srun or by torchrun. `hpcaccel submit job.yaml --cluster local` trains on this machine",
    "config": "there is nothing to configure beforehand: `hpcaccel init train.py` writes a spec file, and "
    "`hpcaccel cluster add NAME` a profile of a cluster",
    "test": "`hpcaccel submit job.yaml --debug` trains some steps in a short job, and `hpcaccel validate job.yaml "
    "--live` checks a spec against the cluster",
    "env": "`hpcaccel --version` prints the version, `hpcaccel cluster show NAME` what is known of a cluster; the "
    "versions that a run was submitted with stand in its record.json",
}
"""Commands of Accelerate's that somebody may try, and what to use."""


class WholeSummaries(TyperGroup):
    """A group of commands whose help shows the first sentence of each, however long it is."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = [(name, _summary(command)) for name, command in self.commands.items() if not command.hidden]
        _write("Commands", shown, formatter)


def write_commands(commands: Mapping[str, Any], formatter: Any) -> None:
    """Every command that is not hidden; one of no group stands under ``Other``."""
    left = {name: command for name, command in commands.items() if not command.hidden}
    for title, names in GROUPS.items():
        rows = [(name, _summary(left.pop(name))) for name in names if name in left]
        _write(title, rows, formatter)
    _write("Other", [(name, _summary(command)) for name, command in left.items()], formatter)
    _write(TRAINING, list(TRAINING_LINES), formatter)


def write_examples(formatter: Any) -> None:
    _write("Examples", list(EXAMPLES), formatter)


def _write(title: str, rows: list[tuple[str, str]], formatter: Any) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=52)


def _summary(command: Any) -> str:
    """The first paragraph of its help, whole."""
    return " ".join((command.help or "").split("\n\n")[0].split())
