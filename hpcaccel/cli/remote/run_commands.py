"""Commands that do otherwise on a cluster behind SSH than here: ``submit``, ``sweep start``, ``sweep plot``, ``logs``,
``shell``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from hpcaccel.cli.output import note, print_bytes, terminal_columns
from hpcaccel.cli.remote.dispatch import behind_ssh_run
from hpcaccel.cli.remote.forward import EXIT_INTERRUPTED, copy_frames
from hpcaccel.cli.remote.spec_commands import refuse_by_facts
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec
    from hpcaccel.submission.remote.bundle import Handed
    from hpcaccel.submission.remote.remote_cluster import RemoteCluster

__all__ = ["logs_there", "plot_there", "shell_there", "submit_there"]


def submit_there(
    cluster: RemoteCluster,
    file: Path,
    overrides: Sequence[str],
    options: Sequence[str],
    *,
    runs_dir: Path | None,
    is_sweep: bool,
    several: Sequence[JobSpec] | None = None,
    wait: bool,
    dry_run: bool,
    json: bool,
    facts: bool = True,
    tasks: int | None = None,
    key: str | None = None,
) -> NoReturn:
    """Submit a spec file there, remember what was submitted, and follow a run with ``wait``.

    Args:
        options: those of the command there.
        several: the jobs of a file that holds several.
        facts: hold it against the stored facts, here and there.
        tasks: of an array.

    Raises:
        typer.Exit: with the exit code of the other side.
    """
    from hpcaccel.submission.remote.bundle import hand_over, pack
    from hpcaccel.submission.remote.local_env import meant_for

    with cluster:
        with meant_for(cluster, file):
            luggage = pack(cluster, str(file), overrides, is_sweep=is_sweep, several=several)
        if facts:
            refuse_by_facts(luggage.jobs, cluster, tasks=tasks, can_leave_aside=not is_sweep)
        handed = hand_over(
            cluster, luggage, options,
            runs_dir=None if runs_dir is None else str(runs_dir), dry_run=dry_run, facts=facts, key=key,
            columns=terminal_columns(), show=partial(_show, only_the_end=wait and json),
        )  # fmt: skip
        if handed.code or not wait or handed.run is None:
            raise typer.Exit(handed.code)
        request = {
            "do": "command",
            "follows": True,
            "args": ["wait", handed.run["run_id"], *(["--json"] if json else [])],
        }
        raise typer.Exit(_until_the_end(cluster, request, copy_frames))


def _show(handed: Handed, *, only_the_end: bool) -> None:
    if handed.repeated and handed.runs and not handed.open:
        what = "this run was" if len(handed.runs) == 1 else "these runs were"
        note(f"note: {what} already submitted; the reply had been lost. Submit again for a new one")
    is_told_at_the_end = only_the_end and handed.run is not None
    print_bytes(err=handed.err, out=b"" if is_told_at_the_end else handed.out)


def plot_there(cluster: RemoteCluster, sweep: str, out: Path) -> None:
    """Have a sweep drawn there, and the drawing brought here.

    Raises:
        typer.Exit: with the exit code of the other side.
    """
    request = {"do": "file", "args": ["sweep", "plot", sweep], "suffix": out.suffix}

    out = out.expanduser().absolute()
    if not out.parent.is_dir():
        raise UserError(f"there is no folder {out.parent}")
    with cluster:
        head, said = cluster.again(lambda: cluster.converse(request, lambda conversation: conversation.to_the_end()))
    print_bytes(err=said.get("err", b""))
    if (content := said.get("file")) is not None:
        from hpcaccel.core.run_dir import atomic_write

        atomic_write(out, content)
        typer.echo(str(out))
    raise typer.Exit(int(head["code"]))


def _until_the_end(cluster: RemoteCluster, request: dict[str, Any], talk: Any) -> int:
    try:
        return int(cluster.again(lambda: cluster.converse(request, talk)))
    except KeyboardInterrupt:
        note("\nthe run goes on")
        return EXIT_INTERRUPTED


def logs_there(run: str | None, *, rank: str, attempt: int | None, follow: bool) -> bool:
    """Show the logs of ``run`` if it is behind SSH; after a broken connection from where they were."""
    found = behind_ssh_run(run)
    if found is None:
        return False
    cluster, run_id = found
    request: dict[str, Any] = {"do": "logs", "run": run_id, "rank": rank, "attempt": attempt, "follow": follow}
    request["position"] = None

    def printed(head: dict[str, Any]) -> None:
        request["position"] = head.get("position", request["position"])

    with cluster:
        raise typer.Exit(_until_the_end(cluster, request, lambda conversation: copy_frames(conversation, printed)))


def shell_there(run: str, node: str | None) -> bool:
    """Open a shell on a node of ``run`` if it is behind SSH; False where it is not."""
    found = behind_ssh_run(run)
    if found is None:
        return False
    cluster, run_id = found
    if not sys.stdin.isatty():
        raise UserError("a shell on a cluster behind SSH needs a terminal")
    with cluster:
        raise typer.Exit(cluster.terminal("shell", run_id, *([] if node is None else ["--node", node])))
