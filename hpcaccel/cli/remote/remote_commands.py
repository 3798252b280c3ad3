"""Commands that need special handling for a cluster behind SSH: those with a spec file on this machine (``submit``,
``sweep start``, ``validate``, ``render``, ``plan``), those that write a file on this machine (``plot``,
``sweep plot``, ``sweep export``), ``logs`` and ``shell``."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from hpcaccel.cli.output import note, print_bytes, terminal_columns
from hpcaccel.cli.remote.forward import copy_frames, follow_there
from hpcaccel.cli.remote.target_cluster import cluster_of_run
from hpcaccel.errors import SpecError, UserError

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec
    from hpcaccel.submission.remote.bundle import SubmissionBundle
    from hpcaccel.submission.remote.delivery import BundleReceipt
    from hpcaccel.submission.remote.remote_cluster import RemoteCluster

__all__ = [
    "bundle_to_inspect",
    "fetch_file_there",
    "given_options",
    "inspect_there",
    "logs_there",
    "print_and_exit",
    "refuse_by_facts",
    "shell_there",
    "submit_there",
]


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
    """Submit a spec file on the cluster, record the runs on this machine and, if ``wait`` is true, follow the run.

    Args:
        options: options to pass to the command on the cluster.
        several: the jobs of the file, if it has several.
        facts: whether to compare the jobs with the stored facts, on this machine and on the cluster.
        tasks: number of tasks of an array; None for a single job.

    Raises:
        typer.Exit: always, with the exit code of the command on the cluster.
        SpecError: the spec is invalid, a secret is not set on this machine, or a job contradicts the facts.
    """
    from hpcaccel.submission.remote.bundle import expanded_on, pack
    from hpcaccel.submission.remote.delivery import hand_over

    with cluster:
        with expanded_on(cluster, file):
            bundle = pack(cluster, str(file), overrides, is_sweep=is_sweep, several=several)
        if facts:
            refuse_by_facts(bundle.jobs, cluster, tasks=tasks, can_leave_aside=not is_sweep)
        receipt = hand_over(
            cluster, bundle, options,
            runs_dir=None if runs_dir is None else str(runs_dir), dry_run=dry_run, facts=facts, key=key,
            columns=terminal_columns(), show=partial(_print_receipt, only_the_end=wait and json),
        )  # fmt: skip
        if receipt.code or not wait or receipt.run is None:
            raise typer.Exit(receipt.code)
        request = {
            "do": "command",
            "follows": True,
            "args": ["wait", receipt.run["run_id"], *(["--json"] if json else [])],
        }
        raise typer.Exit(follow_there(cluster, request, copy_frames))


def _print_receipt(receipt: BundleReceipt, *, only_the_end: bool) -> None:
    if receipt.repeated and receipt.runs and not receipt.open:
        what = "this run was" if len(receipt.runs) == 1 else "these runs were"
        note(f"note: {what} already submitted, but the reply was lost. Submit again for a new run")
    is_printed_at_the_end = only_the_end and receipt.run is not None
    print_bytes(err=receipt.err, out=b"" if is_printed_at_the_end else receipt.out)


def fetch_file_there(cluster: RemoteCluster, command: Sequence[str], out: Path) -> NoReturn:
    """Run ``command``, which writes one file (a plot, a study), on the cluster; fetch the file and write it to ``out``.

    Raises:
        typer.Exit: always, with the exit code of the command on the cluster.
        UserError: the directory of ``out`` does not exist.
    """
    request = {"do": "file", "args": list(command), "suffix": out.suffix}

    out = out.expanduser().absolute()
    if not out.parent.is_dir():
        raise UserError(f"the directory {out.parent} does not exist: create it, or choose another --out")
    with cluster:
        head, output = cluster.again(lambda: cluster.converse(request, lambda conversation: conversation.to_the_end()))
    print_bytes(err=output.get("err", b""))
    if (content := output.get("file")) is not None:
        from hpcaccel.core.durable_files import atomic_write

        atomic_write(out, content)
        typer.echo(str(out))
    raise typer.Exit(int(head["code"]))


def logs_there(run: str | None, *, rank: str, attempt: int | None, follow: bool) -> bool:
    """If ``run`` is behind SSH, show its logs and exit; otherwise return False.

    After a broken connection the output continues where it stopped.
    """
    found = cluster_of_run(run)
    if found is None:
        return False
    cluster, run_id = found
    request: dict[str, Any] = {"do": "logs", "run": run_id, "rank": rank, "attempt": attempt, "follow": follow}
    request["position"] = None

    def printed(head: dict[str, Any]) -> None:
        request["position"] = head.get("position", request["position"])

    with cluster:
        raise typer.Exit(follow_there(cluster, request, lambda conversation: copy_frames(conversation, printed)))


def shell_there(run: str, node: str | None) -> bool:
    """If ``run`` is behind SSH, open a shell on one of its nodes, then exit; otherwise return False."""
    found = cluster_of_run(run)
    if found is None:
        return False
    cluster, run_id = found
    if not sys.stdin.isatty():
        raise UserError("a shell on a cluster behind SSH needs a terminal, and stdin is not one")
    with cluster:
        raise typer.Exit(cluster.terminal("shell", run_id, *([] if node is None else ["--node", node])))


# -- specs --------------------------------------------------------------------------------------------------------


def given_options(context: typer.Context, cluster: RemoteCluster, *, but: Collection[str]) -> list[str]:
    """The options given on this command line, as arguments for the same command on the cluster.

    Args:
        but: names of the parameters that are handled on this machine.
    """
    from hpcaccel.submission.remote.remote_index import name_there

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
            words.append(f"{option}={name_there(cluster.name, str(one))}")
    return words


def refuse_by_facts(
    jobs: Sequence[JobSpec], cluster: RemoteCluster, *, tasks: int | None = None, can_leave_aside: bool = True
) -> None:
    """Compare jobs with the facts stored on this machine, before anything is sent.

    Only contradictions are reported here. The cluster itself gives advice, because it also has the earlier runs.

    Args:
        can_leave_aside: whether the command has an option to ignore the facts; if so, the hint mentions this option.

    Raises:
        SpecError: a job contradicts the facts.
    """
    from hpcaccel.submission.clusters.checks import advice_or_refusal

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


def bundle_to_inspect(cluster: RemoteCluster, file: Path, overrides: Sequence[str]) -> SubmissionBundle:
    """Bundle a spec file on this machine for a command on the cluster that does not submit the file.

    Raises:
        SpecError: the file has mistakes; the message has a line for each mistake.
    """
    from hpcaccel.spec.loading.workflow import read_jobs
    from hpcaccel.submission.remote.bundle import expanded_on, pack

    with expanded_on(cluster, file):
        several = read_jobs(file, overrides=overrides)
        return pack(cluster, str(file), overrides, is_sweep=False, several=several, to_submit=False)


def inspect_there(
    cluster: RemoteCluster,
    command: Sequence[str],
    bundle: SubmissionBundle,
    *,
    runs_dir: Path | None = None,
    facts: bool = True,
) -> BundleReceipt:
    """Run ``command`` (with its options) on the cluster, for the spec in ``bundle``. The spec is not submitted."""
    from hpcaccel.spec.cluster.cluster_facts import load_facts
    from hpcaccel.submission.remote.delivery import asked

    if facts:
        load_facts(cluster.name)  # raises SpecError if this machine's facts file is invalid
    return asked(
        cluster, bundle, command,
        runs_dir=None if runs_dir is None else os.fspath(runs_dir), facts=facts,
        columns=terminal_columns(),
    )  # fmt: skip


def print_and_exit(receipt: BundleReceipt) -> NoReturn:
    """Print the output of a command on the cluster, and exit with its exit code."""
    print_bytes(out=receipt.out, err=receipt.err)
    raise typer.Exit(receipt.code)
