"""Commands about a spec file that is for a cluster behind SSH: the file is here, Slurm is there."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hpcaccel.cli.output import print_bytes, terminal_columns
from hpcaccel.cli.remote.dispatch import named_there
from hpcaccel.errors import SpecError

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec
    from hpcaccel.submission.remote.bundle import Handed, Luggage
    from hpcaccel.submission.remote.remote_cluster import RemoteCluster

__all__ = ["asked_there", "given_options", "refuse_by_facts", "shown", "to_look_at"]


def given_options(context: typer.Context, cluster: RemoteCluster, *, but: Collection[str]) -> list[str]:
    """The options of this call as words for the same command there, whichever it has.

    Args:
        but: names of the parameters that are seen to here.
    """
    words: list[str] = []
    for param in context.command.params:
        value = context.params.get(param.name or "")
        source = context.get_parameter_source(param.name or "")
        is_given = source is not None and source.name == "COMMANDLINE"
        if param.param_type_name != "option" or param.name in but or not is_given:
            continue
        option = max(param.opts, key=len)
        if isinstance(value, bool):
            words.append(option if value else max(param.secondary_opts, key=len))
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            words.append(f"{option}={named_there(cluster, str(one))}")
    return words


def refuse_by_facts(
    jobs: Sequence[JobSpec], cluster: RemoteCluster, *, tasks: int | None = None, can_leave_aside: bool = True
) -> None:
    """Hold specs against the facts that are stored here before anything is sent; what they merely remark is told by
    the cluster, which also knows the runs of before.

    Args:
        can_leave_aside: the command has an option for that, which its hint names.

    Raises:
        SpecError: a spec is more than that cluster has.
    """
    from hpcaccel.submission.site.checks import advice_or_refusal

    problems: list[str] = []
    hints: list[str] = []
    for job in jobs:
        try:
            advice_or_refusal(job, cluster.profile, array_tasks=tasks, can_leave_aside=can_leave_aside)
        except SpecError as error:
            problems += error.problems
            hints += error.hints
    if problems:
        raise SpecError(list(dict.fromkeys(problems)), hints=list(dict.fromkeys(hints)))


def to_look_at(cluster: RemoteCluster, file: Path, overrides: Sequence[str]) -> Luggage:
    """A spec file that lies here, made ready to be looked at there; nothing is submitted.

    Raises:
        SpecError: with a line for each thing that is wrong with the file.
    """
    from hpcaccel.spec.workflow import read_jobs
    from hpcaccel.submission.remote.bundle import pack
    from hpcaccel.submission.remote.local_env import meant_for

    with meant_for(cluster, file):
        several = read_jobs(file, overrides=overrides)
        return pack(cluster, str(file), overrides, is_sweep=False, several=several, to_submit=False)


def asked_there(
    cluster: RemoteCluster,
    command: Sequence[str],
    luggage: Luggage,
    *,
    runs_dir: Path | None = None,
    facts: bool = True,
) -> Handed:
    """What ``command``, with its options, says there of a spec that is not submitted."""
    from hpcaccel.spec.site import load_facts
    from hpcaccel.submission.remote.bundle import asked

    if facts:
        load_facts(cluster.name)  # what is wrong with them is told of the file that is here
    return asked(
        cluster, luggage, command,
        runs_dir=None if runs_dir is None else os.fspath(runs_dir), facts=facts,
        columns=terminal_columns(),
    )  # fmt: skip


def shown(answer: Handed) -> typer.Exit:
    """Print an answer; what is to be raised then."""
    print_bytes(out=answer.out, err=answer.err)
    return typer.Exit(answer.code)
