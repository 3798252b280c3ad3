"""``stacks``: where the ranks of a run are at this moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.options import Json, RunName
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.run_lookup import find, one_run
from hpcaccel.errors import UserError
from hpcaccel.slurm.hostlist import ranks_text

if TYPE_CHECKING:
    from hpcaccel.core.run_dir import RunDir
    from hpcaccel.view.stack_groups import Group, RankStacks

__all__ = ["stacks"]


def stacks(
    run: RunName,
    rank: Annotated[
        int | None, typer.Option(metavar="N", help="All threads of this rank, not only its main one.", min=0)
    ] = None,
    json: Json = False,
) -> None:
    """Show where the ranks of a run are: those at the same place together, first those that are elsewhere.

    The ranks go on as if nothing had been asked. Of a run that has ended it shows what was written when it hung.
    """
    from hpcaccel.view.stack_groups import ask, newest_dump, wait_for_answers

    found = one_run(find(run))
    attempt = found.status().attempts
    silent: list[int] = []
    if found.status().ended:
        attempt = _attempt_with_stacks(found.dir, attempt)
    else:
        before = ask(found.dir, attempt)
        if not before:
            raise UserError(_NOBODY.format(run=found.run_id))
        silent = wait_for_answers(found.dir, attempt, before)
    seen = newest_dump(found.dir, attempt)
    fresh = [one for one in seen if one.rank not in silent]
    if rank is not None:
        _show_rank(fresh, rank, json=json)
    else:
        _show(fresh, silent, attempt, json=json)


_NOBODY = (
    "no rank of {run} gives signs of life: it has not come to its Accelerator() yet, or its program does not use one. "
    "For the latter py-spy shows the same: hpcaccel shell {run}, then py-spy dump --pid ..."
)


def _attempt_with_stacks(run: RunDir, newest: int) -> int:
    """
    Raises:
        UserError: no attempt has hung, and nobody has asked while one ran.
    """
    from hpcaccel.view.stack_groups import newest_dump

    for attempt in range(newest, 0, -1):
        if newest_dump(run, attempt):
            note(f"{run.run_id} has ended; this was written in attempt {attempt} ({run.stacks(attempt)})")
            return attempt
    raise UserError(f"run {run.run_id} has ended, and none of its attempts left stacks: there is nothing to show")


def _show(seen: list[RankStacks], silent: list[int], attempt: int, *, json: bool) -> None:
    from hpcaccel.view.stack_groups import group

    groups = group(seen)
    if json:
        print_json({"attempt": attempt, "groups": [one.to_json() for one in groups], "silent": silent})
        return
    for one in groups:
        _print_group(one)
    if silent:
        typer.echo(f"{ranks_text(silent)}: no answer; stopped (SIGSTOP), or gone")


def _print_group(group: Group) -> None:
    where = ", ".join(group.nodes[:4]) + (" ..." if len(group.nodes) > 4 else "")
    waits = ", waits for other ranks or its device" if group.waits else ""
    typer.echo(f"{ranks_text(group.ranks)} on {where}{waits}:")
    for call in group.calls or ("not in Python",):
        typer.echo(f"    {call}")
    typer.echo("")


def _show_rank(seen: list[RankStacks], rank: int, *, json: bool) -> None:
    found = next((one for one in seen if one.rank == rank), None)
    if found is None:
        answered = ranks_text([one.rank for one in seen]) if seen else "no rank"
        raise UserError(f"rank {rank} has not answered, or there is no such rank (there are stacks of {answered})")
    threads = found.threads
    if json:
        print_json({"rank": rank, "node": found.node, "threads": [{"calls": list(one.calls)} for one in threads]})
        return
    for number, thread in enumerate(threads):
        typer.echo("main thread:" if number == 0 else f"thread {thread.name}:")
        for call in thread.calls or ("not in Python",):
            typer.echo(f"    {call}")
        typer.echo("")
