"""``logs``, ``stacks``, ``shell``: show the output and the stacks of a run's ranks, and open a shell on their nodes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcaccel.cli.options import RUN_HELP, Json, RunName
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.remote_commands import logs_there, shell_there
from hpcaccel.cli.run_names import complete_run, find, latest, one_run
from hpcaccel.errors import ClusterError, UserError
from hpcaccel.slurm.hostlist import ranks_text

if TYPE_CHECKING:
    from hpcaccel.core.run_dir import RunDir
    from hpcaccel.submission import Run
    from hpcaccel.view.log_reader import Logs
    from hpcaccel.view.stack_groups import RankStacks, StackGroup

__all__ = ["logs", "shell", "stacks", "stream_logs"]


def logs(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help=f"{RUN_HELP} Default: the latest run.",
            show_default=False,
            autocompletion=complete_run,
        ),
    ] = None,
    rank: Annotated[str, typer.Option(metavar="N", help="A rank, 'all', 'supervisor', 'batch', or a component.")] = "0",
    attempt: Annotated[
        int | None, typer.Option(metavar="N", help="Show only this attempt. Default: the newest.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the output until the run ends.")] = False,
) -> None:
    """Show the output of a run."""
    if logs_there(run, rank=rank, attempt=attempt, follow=follow):
        return
    from hpcaccel.submission.runs.watch import BackgroundQuery
    from hpcaccel.view.log_reader import Logs, copy_logs

    found = one_run(find(run) if run is not None else latest()).dir
    wanted = Logs(found, rank=rank, attempt=attempt)
    status = BackgroundQuery.about(found)
    written = copy_logs(wanted, sys.stdout.buffer, ended=(lambda: status.now().ended) if follow else None)
    if written == 0:
        _explain_empty(found, wanted)
    if text := _rank_at_fault(found, wanted):
        note(text)


def stream_logs(request: Mapping[str, Any], write: Callable[[bytes, dict[str, Any]], None]) -> str:
    """Serve the ``logs`` command of another machine: write the logs in chunks, starting at ``request["position"]``.

    Args:
        request: a mapping with the keys ``run``, ``rank``, ``attempt``, ``follow`` and ``position``.
        write: called with each chunk and the position after it.

    Returns:
        A message for the user if the requested log is empty, does not exist, or is not that of the rank at fault;
        otherwise an empty string.
    """
    from hpcaccel.submission.runs.watch import BackgroundQuery
    from hpcaccel.view.log_reader import LOOK_SECONDS, Logs

    found = one_run(find(request["run"]) if request["run"] is not None else latest()).dir
    wanted = Logs(found, rank=request["rank"], attempt=request["attempt"])
    if request["position"] is not None:
        wanted.go_on(request["position"])
    status = BackgroundQuery.about(found)
    nothing = request["position"] is None
    while True:
        over = not request["follow"] or status.now().ended
        for chunk in wanted.new(last=over):
            write(chunk, wanted.position())
            nothing = False
        if over:
            break
        time.sleep(LOOK_SECONDS)
    if nothing and wanted.rank != "batch" and not wanted.attempts() and found.slurm_log.exists():
        return f"no attempt has started; the batch script printed:\n{found.slurm_log.read_text()}"
    notes = [_no_output(found, wanted) if nothing else "", _rank_at_fault(found, wanted)]
    return "".join(f"{text}\n" for text in notes if text)


def _explain_empty(run: RunDir, wanted: Logs) -> None:
    """Print why there is no output; if no rank has started, show the output of the batch script."""
    from hpcaccel.view.log_reader import Logs, copy_logs

    if wanted.rank != "batch" and not wanted.attempts() and run.slurm_log.exists():
        note(f"no attempt has started; the batch script printed ({run.slurm_log}):")
        copy_logs(Logs(run, rank="batch"), sys.stdout.buffer)
        return
    note(_no_output(run, wanted))


def _no_output(run: RunDir, wanted: Logs) -> str:
    """That the requested log is empty or does not exist, and which attempts may have one."""
    known = ", ".join(map(str, wanted.attempts())) or "none yet"
    text = f"{run.run_id} has no output for --rank {wanted.rank} (attempts: {known})"
    if wanted.attempt is None and len(wanted.attempts()) > 1:
        text += "; `--attempt N` shows an earlier attempt"
    return text


def _rank_at_fault(run: RunDir, wanted: Logs) -> str:
    """Which rank's log shows why the attempt failed, if ``wanted`` is the log of another rank; otherwise empty.

    The ranks that lose their peer end with an error of their own, so that rank 0's log may show a consequence only.
    """
    from hpcaccel.core.run_ledger import RunLedger
    from hpcaccel.view.rank_states import failed_rank

    newest = max(wanted.attempts(), default=0)
    attempt = wanted.attempt if wanted.attempt is not None else newest
    end = RunLedger.read(run).end_of(attempt)
    rank = None if end is None else failed_rank(run, end)
    if end is None or rank is None or not wanted.rank.isdecimal() or int(wanted.rank) == rank:
        return ""
    if end.error_class == "hang":
        text = f"attempt {attempt} hung: rank {rank} kept the others waiting"
        return f"{text}; see `hpcaccel stacks {run.run_id}`" if attempt == newest else text
    return f"attempt {attempt} failed on rank {rank}; its log: `hpcaccel logs {run.run_id} --rank {rank}`"


# -- stacks -------------------------------------------------------------------------------------------------------


def stacks(
    run: RunName,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Show all threads of this rank only.", min=0)] = None,
    json: Json = False,
) -> None:
    """Show where in the code the ranks of a run are, grouped by stack, outliers first.

    The ranks are not interrupted. If the run has ended, the last stacks that it wrote are shown.
    """
    from hpcaccel.view.stack_groups import newest_dump, request_dump, wait_for_dump

    found = one_run(find(run))
    attempt = found.status().attempts
    silent: list[int] = []
    if found.status().ended:
        attempt = _attempt_with_stacks(found.dir, attempt)
    else:
        before = request_dump(found.dir, attempt)
        if not before:
            raise UserError(_NO_HEARTBEAT.format(run=found.run_id))
        silent = wait_for_dump(found.dir, attempt, before)
    seen = newest_dump(found.dir, attempt)
    fresh = [one for one in seen if one.rank not in silent]
    if rank is not None:
        _show_rank(fresh, rank, json=json)
    else:
        _show_groups(fresh, silent, attempt, json=json)


_NO_HEARTBEAT = (
    "no rank of {run} writes heartbeats: its program has not called Accelerator() or stop_gate() yet, or uses neither. "
    "If it uses neither, use py-spy: hpcaccel shell {run}, then py-spy dump --pid ..."
)


def _attempt_with_stacks(run: RunDir, newest: int) -> int:
    """The newest attempt that has stacks; attempts after ``newest`` are not considered.

    Raises:
        UserError: no attempt has stacks: none hung, and no user requested stacks while one was running.
    """
    from hpcaccel.view.stack_groups import newest_dump

    for attempt in range(newest, 0, -1):
        if newest_dump(run, attempt):
            note(f"{run.run_id} has ended; these stacks were written in attempt {attempt} ({run.stacks(attempt)})")
            return attempt
    raise UserError(f"run {run.run_id} has ended, and none of its attempts wrote stacks")


def _show_groups(seen: list[RankStacks], silent: list[int], attempt: int, *, json: bool) -> None:
    from hpcaccel.view.stack_groups import group

    groups = group(seen)
    if json:
        print_json({"attempt": attempt, "groups": [one.to_json() for one in groups], "silent": silent})
        return
    for one in groups:
        _print_group(one)
    if silent:
        typer.echo(f"{ranks_text(silent)}: no response; stopped (SIGSTOP) or exited")


def _print_group(group: StackGroup) -> None:
    where = ", ".join(group.nodes[:4]) + (" ..." if len(group.nodes) > 4 else "")
    waits = ", waiting for other ranks or the device" if group.waits else ""
    typer.echo(f"{ranks_text(group.ranks)} on {where}{waits}:")
    for call in group.calls or ("not in Python",):
        typer.echo(f"    {call}")
    typer.echo("")


def _show_rank(seen: list[RankStacks], rank: int, *, json: bool) -> None:
    found = next((one for one in seen if one.rank == rank), None)
    if found is None:
        received = ranks_text([one.rank for one in seen]) if seen else "no rank"
        raise UserError(f"no stacks of rank {rank}: it did not respond or does not exist (stacks of: {received})")
    threads = found.threads
    if json:
        print_json({"rank": rank, "node": found.node, "threads": [{"calls": list(one.calls)} for one in threads]})
        return
    for number, thread in enumerate(threads):
        typer.echo("main thread:" if number == 0 else f"thread {thread.name}:")
        for call in thread.calls or ("not in Python",):
            typer.echo(f"    {call}")
        typer.echo("")


# -- shell --------------------------------------------------------------------------------------------------------


def shell(
    run: RunName,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Name of the node, or its index in the job. Default: the first.", show_default=False
        ),
    ] = None,
) -> None:
    """Open a shell on a node of a running job, alongside its ranks, in the run directory."""
    if shell_there(run, node):
        return
    found = one_run(find(run))
    if found.record.backend == "local":
        _on_this_machine(found, node)
    else:
        _on_a_node(found, node)


def _on_this_machine(run: Run, node: str | None) -> None:
    if node not in (None, "0"):
        raise UserError(f"--node {node!r}: {run.run_id} runs on this machine only; omit --node")
    note(f"opening a shell in {run.path}; type exit to leave it")
    os.chdir(run.path)
    os.execvpe("bash", ["bash"], {**os.environ, "HPCACCEL_RUN_DIR": str(run.path)})


def _on_a_node(run: Run, node: str | None) -> None:
    from hpcaccel.slurm.commands import Slurm
    from hpcaccel.submission.runs.attempts import read_attempts

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
        raise ClusterError(f"{command[0]!r} is not installed here: log in to a node of the cluster") from None


def _name_of(node: str | None, nodes: list[str], run_id: str) -> str | None:
    """The name of the node that ``node``, a name or an index, refers to.

    If ``node`` is None, returns the first node, or None if the nodes are not known yet.
    """
    if node is None:
        return nodes[0] if nodes else None
    if node in nodes:
        return node
    if node.isdecimal() and int(node) < len(nodes):
        return nodes[int(node)]
    known = f"0 to {len(nodes) - 1}, or {', '.join(nodes)}" if nodes else "not known before the ranks start"
    raise UserError(f"--node {node!r} is not a node of {run_id} (its nodes: {known})")
