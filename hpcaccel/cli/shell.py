"""``shell``: a shell beside the ranks of a running job."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.options import RunName
from hpcaccel.cli.output import note
from hpcaccel.cli.run_lookup import find, one_run
from hpcaccel.errors import ClusterError, UserError

if TYPE_CHECKING:
    from hpcaccel.submission import Run

__all__ = ["shell"]


def shell(
    run: RunName,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="A node's name, or its index in the job. Without it: the first.", show_default=False
        ),
    ] = None,
) -> None:
    """Open a shell on a node of the running job, beside its ranks, in the run's directory."""
    from hpcaccel.cli.remote.run_commands import shell_there

    if shell_there(run, node):
        return
    found = one_run(find(run))
    if found.record.backend == "local":
        _on_this_machine(found, node)
    else:
        _on_a_node(found, node)


def _on_this_machine(run: Run, node: str | None) -> None:
    if node not in (None, "0"):
        raise UserError(f"--node {node}: {run.run_id} runs on this machine alone")
    note(f"a shell in {run.path}; leave it with exit")
    os.chdir(run.path)
    os.execvpe("bash", ["bash"], {**os.environ, "HPCACCEL_RUN_DIR": str(run.path)})


def _on_a_node(run: Run, node: str | None) -> None:
    from hpcaccel.slurm.commands import Slurm
    from hpcaccel.view.attempts import read_attempts

    now = run.status()
    if now.state not in ("starting", "running", "stopping"):
        raise UserError(f"{run.run_id} is {now.state}: there is no node to open a shell on")
    attempts = read_attempts(run.dir)
    nodes = attempts[-1].start.nodes if attempts and attempts[-1].start is not None else []
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    command = Slurm().shell_command(now.job_id, node=_name_of(node, nodes, run.run_id), terminal=terminal)
    note(" ".join(command))
    os.chdir(run.path)
    try:
        os.execvpe(command[0], command, {**os.environ, "HPCACCEL_RUN_DIR": str(run.path)})
    except FileNotFoundError:
        raise ClusterError(f"there is no {command[0]} on this machine; log in to a node of the cluster") from None


def _name_of(node: str | None, nodes: list[str], run_id: str) -> str | None:
    """The node's name for a name or an index; None (Slurm's choice) where nothing was said."""
    if node is None:
        return nodes[0] if nodes else None
    if node in nodes:
        return node
    if node.isdecimal() and int(node) < len(nodes):
        return nodes[int(node)]
    known = f"0 to {len(nodes) - 1}, or {', '.join(nodes)}" if nodes else "not known before the ranks start"
    raise UserError(f"--node {node!r} is no node of {run_id} (its nodes: {known})")
