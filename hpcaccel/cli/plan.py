"""``plan``: partitions and sizes side by side, before anything is submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.cluster_option import chosen_profile
from hpcaccel.cli.options import Cluster, Json, Overrides, SpecFile
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.dispatch import behind_ssh
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec
    from hpcaccel.submission.queue_plan import Choice

__all__ = ["plan"]


def plan(
    context: typer.Context,
    file: SpecFile,
    overrides: Overrides = None,
    partition: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Partitions to compare. Without it: the spec's.", show_default=False),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="2,4,8", help="Numbers of nodes to compare. Without it: the spec's.", show_default=False),
    ] = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Compare when a job would start, and its GPU-hours, in partitions and sizes. Nothing is submitted.

    Of a file with several jobs: each of them.
    """
    from hpcaccel.spec.site import load_facts
    from hpcaccel.submission.queue_plan import plan_jobs

    if (there := behind_ssh(cluster)) is not None:
        from hpcaccel.cli.remote.spec_commands import asked_there, given_options, shown, to_look_at

        with there:
            words = ["plan", *given_options(context, there, but={"cluster"})]
            raise shown(asked_there(there, words, to_look_at(there, file, overrides or [])))
    profile = chosen_profile(cluster)
    if profile is not None and profile.backend == "local":
        raise UserError("there is no queue on the local backend: a job starts at once. Name a cluster with --cluster")
    facts = None if profile is None else load_facts(profile.name)
    sizes = {"partitions": _parts(partition), "nodes": _parts(nodes)}
    with _progress() as tell:
        found = plan_jobs(file, **sizes, overrides=overrides or [], profile=profile, facts=facts, tell=tell)
    if json:
        print_json([choice.to_json() for choice in found])
    else:
        _print(found)
        note("hours are those of a job that uses its whole time limit; a start is what Slurm expects at this moment")
        if facts is not None and any(one.problem for one in found):
            note(f"what the facts of {facts.name}, {facts.age_text()} old, forbid was not asked of Slurm")


@contextmanager
def _progress() -> Iterator[Callable[[JobSpec], None]]:
    """What is being asked about, on a terminal: a busy controller takes a second for each."""
    from rich.console import Console

    with Console(stderr=True).status("asking Slurm …") as status:
        yield lambda spec: status.update(
            f"asking Slurm: {spec.slurm.partition or 'the default partition'}, {spec.slurm.nodes or 1} nodes …"
        )


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _print(found: Sequence[Choice]) -> None:
    from hpcaccel.view.formatting import clean, clock_time, duration
    from hpcaccel.view.text_tables import Cell, Column, Styled, console_for, print_table

    several = any(one.job for one in found)
    columns = (
        *([Column(title="JOB")] if several else []),
        Column(title="PARTITION"),
        Column(title="NODES", right=True),
        Column(title="GPUS", right=True, leaves=2),
        Column(title="TIME"),
        Column(title="STARTS", shortens=0, leaves=3),
        Column(title="WAITS"),
        Column(title="NODE-HOURS", right=True, leaves=1),
        Column(title="GPU-HOURS", right=True, leaves=4),
        Column(title="BUT", wraps=20),
    )
    rows: list[list[Cell | tuple[Cell, Cell]]] = []
    for one in found:
        starts = "-" if one.start_time is None else clock_time(one.start_time)
        rows.append([
            *([clean(one.job)] if several else []),
            clean(one.partition),
            str(one.nodes),
            str(one.gpus),
            "no limit" if one.time_seconds is None else duration(one.time_seconds),
            (starts, starts.partition("-")[2] or starts),
            "-" if one.waits_seconds is None else duration(one.waits_seconds),
            "-" if one.node_hours is None else f"{one.node_hours:.1f}",
            "-" if one.gpu_hours is None else f"{one.gpu_hours:.1f}",
            Styled(clean(one.problem), "yellow"),
        ])  # fmt: skip
    print_table(columns, rows, console=console_for(None))
