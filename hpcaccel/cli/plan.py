"""``plan``: compares partitions and node counts before a submission."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.options import Cluster, Json, Overrides, SpecFile
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.remote_commands import bundle_to_inspect, given_options, inspect_there, print_and_exit
from hpcaccel.cli.remote.target_cluster import behind_ssh
from hpcaccel.cli.rendered_scripts import chosen_profile
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec
    from hpcaccel.submission.clusters.plan import Choice

__all__ = ["plan"]


def plan(
    context: typer.Context,
    file: SpecFile,
    overrides: Overrides = None,
    partition: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Partitions to compare. Default: the spec's.", show_default=False),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="2,4,8", help="Node counts to compare. Default: the spec's.", show_default=False),
    ] = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Compare the expected start and the GPU-hours of a job across partitions and node counts. Nothing is submitted.

    If the file has several jobs, all of them are compared.
    """
    from hpcaccel.spec.cluster.cluster_facts import load_facts
    from hpcaccel.submission.clusters.plan import plan_jobs

    if (there := behind_ssh(cluster)) is not None:
        with there:
            words = ["plan", *given_options(context, there, but={"cluster"})]
            print_and_exit(inspect_there(there, words, bundle_to_inspect(there, file, overrides or [])))
    profile = chosen_profile(cluster)
    if profile is not None and profile.backend == "local":
        raise UserError("the local backend has no queue: a job starts immediately. Choose a cluster with --cluster")
    facts = None if profile is None else load_facts(profile.name)
    sizes = {"partitions": _parts(partition), "nodes": _parts(nodes)}
    with _progress() as on_query:
        found = plan_jobs(file, **sizes, overrides=overrides or [], profile=profile, facts=facts, on_query=on_query)
    if json:
        print_json([choice.to_json() for choice in found])
    else:
        _print(found)
        note("hours assume that the job uses its whole time limit; starts are Slurm's current estimates")
        if facts is not None and any(one.problem for one in found):
            note(f"jobs that contradict the facts of {facts.name} ({facts.age_text()} old) were not checked with Slurm")


@contextmanager
def _progress() -> Iterator[Callable[[JobSpec], None]]:
    """Yield a callback that shows on a terminal which job is being estimated. A busy Slurm controller may take a second
    per job."""
    from rich.console import Console

    with Console(stderr=True).status("querying Slurm …") as status:
        yield lambda spec: status.update(
            f"querying Slurm: partition {spec.slurm.partition or '(default)'}, nodes {spec.slurm.nodes or 1} …"
        )


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _print(found: Sequence[Choice]) -> None:
    from hpcaccel.core.formatting import clean, clock_time, duration
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
        Column(title="PROBLEM", wraps=20),
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
