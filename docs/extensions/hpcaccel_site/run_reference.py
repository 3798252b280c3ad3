"""Files of a run directory, failure causes and exit codes, each from its one source."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from hpcaccel.cli.output import EXIT_INTERRUPTED
from hpcaccel.cli.quick import EXIT_BROKEN_PIPE
from hpcaccel.core.rank_protocol import EXIT_CONTINUED
from hpcaccel.errors import HpcaccelError, UserError
from hpcaccel.node.failures import CAUSES
from hpcaccel_site.markdown import code, plain, table

__all__ = ["EXIT_CODES", "exit_codes", "failure_causes", "run_directory", "sweep_directory"]

_DESIGN = Path(__file__).resolve().parents[2] / "design.md"

_FOLLOWS = {
    "restart": "The ranks start again in the same allocation, up to `resilience.restart_in_place` times; after that "
    "the job is requeued.",
    "requeue": "The job releases its nodes and is requeued.",
    "exclude": "The nodes that the evidence names are excluded. The ranks start again on spare nodes of the job, else "
    "the job is requeued.",
    "end": "The run ends: another attempt would fail in the same way.",
}

EXIT_CODES = (
    (0, "completed", "The command did what it was asked to; with `--wait`, the run has completed."),
    (HpcaccelError.exit_code, "failed", "The run failed, or a program that the command needs (Slurm, ssh) failed."),
    (UserError.exit_code, "user error", "Something that you can mend: a spec, an argument, a run that does not exist. "
     "The message says what to do."),
    (EXIT_CONTINUED, "stopped", "The run has saved and can be continued: it is requeued, or waits for "
     "`hpcaccel resume`."),
    (EXIT_INTERRUPTED, "cancelled", "The run was cancelled, or the command was interrupted with Ctrl-C."),
    (EXIT_BROKEN_PIPE, "closed pipe", "The program that read the output has ended, as in `hpcaccel list | head -1`."),
)  # fmt: skip


def exit_codes() -> str:
    """Markdown: the exit codes of all commands."""
    return table(("code", "name", "meaning"), [(code(str(one)), name, plain(text)) for one, name, text in EXIT_CODES])


def failure_causes() -> str:
    """Markdown: a section for each failure cause, in the order of precedence."""
    parts = []
    for one in CAUSES:
        lines = [
            f"## {one.name}",
            f"**What happened**: {plain(one.meaning)}.",
            f"**What follows**: {_FOLLOWS[one.follows]}",
        ]
        if one.innocent:
            lines.append("If a node was excluded for it, the attempt does not count for the caps.")
        if one.advice:
            lines.append(f"**What you can do**: {plain(one.advice)}")
        parts.append("\n\n".join(lines) + "\n")
    return "\n".join(parts)


def run_directory() -> str:
    """Markdown: the section about run directories of the page about hpcaccel's design."""
    return _section("A run directory")


def sweep_directory() -> str:
    """Markdown: the table of files of the section about sweeps of the page about hpcaccel's design."""
    lines = _section("A sweep").splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if line.startswith("| file "))
    return "".join(takewhile(lambda line: line.startswith("|"), lines[start:]))


def _section(title: str) -> str:
    """A section of docs/design.md without its heading; links of that page lead from the folder ``reference``."""
    _, found, rest = _DESIGN.read_text(encoding="utf-8").partition(f"\n## {title}\n")
    if not found:
        raise ValueError(f"{_DESIGN} has no section {title!r}")
    return rest.partition("\n## ")[0].strip().replace("](", "](../") + "\n"
