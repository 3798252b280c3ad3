"""``test``: the self-test, on this machine, in an allocation, or as a job; and the verdict on each node."""

from __future__ import annotations

import json as json_module
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hpcaccel.cli.options import Cluster, Json, Overrides, RunsDir
from hpcaccel.cli.output import EXIT_INTERRUPTED, note, print_bytes, print_json, terminal_columns
from hpcaccel.cli.remote.forward import copy_frames, follow_there
from hpcaccel.cli.remote.target_cluster import behind_ssh, cluster_of_run
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.core.run_dir import RunDir
    from hpcaccel.submission.remote.remote_cluster import RemoteCluster
    from hpcaccel.submission.submit.salloc import SallocAllocation
    from hpcaccel.view.selftest_results import SelftestResults

__all__ = ["selftest"]

MINUTES = 15
"""Time limit of the job."""
EXIT_BAD = 1

NumProcesses = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Number of ranks on this machine. Default: one per GPU, or 2 without GPUs.",
        show_default=False,
    ),
]
Nodes = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Submit a job on this number of nodes.", show_default=False)
]
GpusPerNode = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="GPUs per node of the job, one rank each.", show_default=False),
]
Timeout = Annotated[float, typer.Option(min=1, metavar="SECONDS", help="How long ranks wait for each other.")]
Report = Annotated[
    str | None,
    typer.Option(
        metavar="RUN", help="Show the verdict of an earlier test that was submitted as a job.", show_default=False
    ),
]


def selftest(
    overrides: Overrides = None,
    num_processes: NumProcesses = None,
    cluster: Cluster = None,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = None,
    timeout: Timeout = 60.0,
    runs_dir: RunsDir = None,
    report: Report = None,
    json: Json = False,
) -> None:
    """Test GPUs, disks, clocks, the network between all nodes, a training step and a checkpoint; name the bad node.

    Without options, the ranks run on this machine or, in a shell inside a Slurm allocation, on its nodes. With
    --cluster or --nodes, a job is submitted, and KEY=VALUE sets values of its spec, such as slurm.partition=gpu.

    The exit code is 0 if no node is bad, 1 if one is.
    """
    settings = list(overrides or [])
    is_job = cluster not in (None, "local") or nodes is not None or gpus_per_node is not None
    if report is not None:
        _report(report, cluster, json=json)
    if num_processes is not None and is_job:
        raise UserError(
            f"--num-processes {num_processes} is for a test on this machine. For a job, set --nodes and "
            "--gpus-per-node or, without GPUs, slurm.ntasks_per_node=N"
        )
    in_allocation = bool(os.environ.get("SLURM_JOB_ID")) and num_processes is None and cluster != "local"
    if not is_job and not in_allocation:
        if settings:
            raise UserError(
                f"{settings[0]!r} sets a value of a job's spec, but this test runs on this machine. Submit a job with "
                "--cluster or --nodes"
            )
        from hpcaccel.cli.selftest_ranks import run_on_this_machine

        results = run_on_this_machine(num_processes, timeout_seconds=timeout, runs_dir=runs_dir)
        _show(results, json=json)
    spec = _spec(nodes=nodes, gpus_per_node=gpus_per_node, timeout=timeout)
    if (there := behind_ssh(cluster) if is_job else None) is not None:
        _submit_there(there, spec, settings, runs_dir=runs_dir, json=json)
    if is_job:
        _submit(spec, settings, cluster=cluster, runs_dir=runs_dir, json=json)
    _run_inside(spec, settings, runs_dir=runs_dir, json=json)


def _spec(*, nodes: int | None, gpus_per_node: int | None, timeout: float) -> dict[str, Any]:
    """The values of the job's spec."""
    slurm: dict[str, Any] = {"nodes": nodes or 1, "time": MINUTES}
    if gpus_per_node is not None:
        slurm["gpus_per_node"] = gpus_per_node
    arguments = ["--results", "{run_dir}/selftest", "--checkpoints", "{run_dir}", "--timeout", f"{timeout:g}"]
    return {
        "name": "selftest",
        "entrypoint": {"module": "hpcaccel.runtime.selftest", "args": arguments},
        "slurm": slurm,
        "code": {"copy": False},
        # One attempt, with all nodes: the test itself finds those that a preflight would leave out.
        "resilience": {"requeue": False, "restart_in_place": 0, "max_failures": 1, "preflight": "off"},
    }


def _submit(
    spec: dict[str, Any], overrides: Sequence[str], *, cluster: str | None, runs_dir: Path | None, json: bool
) -> NoReturn:
    """Submit the job on this machine's Slurm, wait for its end, and print the verdict."""
    from hpcaccel.spec import spec_from_values
    from hpcaccel.submission.submit.api import submit_prepared
    from hpcaccel.submission.submit.idempotent import Always
    from hpcaccel.submission.submit.prepare import prepare

    prepared = prepare(spec_from_values(spec), cluster=cluster, runs_dir=runs_dir, overrides=overrides)
    run = submit_prepared(prepared, once=Always())
    note(f"submitted {run.run_id} as job {run.job_id}: {run.path}")
    _follow(run.dir, json=json)


def _run_inside(spec: dict[str, Any], overrides: Sequence[str], *, runs_dir: Path | None, json: bool) -> NoReturn:
    """Run the test on the nodes of this shell's allocation, and print the verdict."""
    import time

    from hpcaccel.slurm.commands import Slurm
    from hpcaccel.spec import spec_from_values
    from hpcaccel.submission.submit.api import submit_prepared
    from hpcaccel.submission.submit.idempotent import Always
    from hpcaccel.submission.submit.prepare import prepare
    from hpcaccel.submission.submit.salloc import allocation_around, overrides_inside, prepared_inside, run_script

    slurm, around = Slurm(), allocation_around()
    settings = [_ranks_inside(around), *overrides, *overrides_inside(around, slurm, time.time())]
    prepared = prepare(spec_from_values(spec), runs_dir=runs_dir, overrides=settings, slurm=slurm, facts=False)
    run = submit_prepared(prepared_inside(prepared, around, slurm), once=Always())
    note(f"running {run.run_id} on {', '.join(around.nodes)}: {run.path}")
    with _stdout_to_stderr():  # the batch step's messages
        run_script(run.dir, show_output=_progress(run.dir))
    _show(_results_of(run.dir), json=json, logs=run.dir)


def _ranks_inside(around: SallocAllocation) -> str:
    """The override for the ranks on each node of an allocation: one per GPU, without GPUs one."""
    from hpcaccel.launch.allocation import gpus_on_each_node
    from hpcaccel.submission.submit.salloc import of_first_component

    gpus = gpus_on_each_node(of_first_component(os.environ), around.job_id, len(around.nodes))
    return f"slurm.gpus_per_node={gpus}" if gpus else "slurm.ntasks_per_node=1"


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _submit_there(
    there: RemoteCluster, spec: dict[str, Any], overrides: Sequence[str], *, runs_dir: Path | None, json: bool
) -> NoReturn:
    """Submit the job on a cluster behind SSH, follow it there, and print its verdict."""
    from hpcaccel.cli.remote.remote_commands import refuse_by_facts
    from hpcaccel.submission.remote.bundle import expanded_on, pack
    from hpcaccel.submission.remote.delivery import BundleReceipt, hand_over

    def show(receipt: BundleReceipt) -> None:
        print_bytes(err=receipt.err + receipt.out)

    with tempfile.TemporaryDirectory() as folder, there:
        file = Path(folder) / "selftest.yaml"
        file.write_text(json_module.dumps(spec))
        with expanded_on(there, file):
            bundle = pack(there, str(file), overrides, is_sweep=False)
        refuse_by_facts(bundle.jobs, there)
        receipt = hand_over(
            there, bundle, [], runs_dir=None if runs_dir is None else str(runs_dir), dry_run=False,
            columns=terminal_columns(), show=show,
        )  # fmt: skip
        if receipt.code or receipt.run is None:
            raise typer.Exit(receipt.code or EXIT_BAD)
        _report_there(there, receipt.run["run_id"], json=json)


# -- the verdict -------------------------------------------------------------------------------------------------------


def _report(token: str, cluster: str | None, *, json: bool) -> NoReturn:
    """Wait until a submitted test has ended, and print its verdict."""
    there = behind_ssh(cluster) if cluster is not None else None
    found = cluster_of_run(token) if there is None else (there, token)
    if found is not None:
        with found[0]:
            _report_there(*found, json=json)
    from hpcaccel.submission import find_run
    from hpcaccel.submission.runs.run_handle import Run

    run = find_run(token)
    if not isinstance(run, Run):
        raise UserError(f"{token} is an array or a sweep, not a self-test")
    _follow(run.dir, json=json)


def _report_there(there: RemoteCluster, run_id: str, *, json: bool) -> NoReturn:
    words = ["test", "--report", run_id, *(["--json"] if json else [])]
    request = {"do": "command", "follows": True, "args": words, "terminal_columns": terminal_columns()}
    raise typer.Exit(follow_there(there, request, copy_frames))


def _follow(run: RunDir, *, json: bool) -> NoReturn:
    from hpcaccel.submission.runs.progress_display import display, follow
    from hpcaccel.submission.runs.watch import BackgroundQuery, Watcher

    try:
        with display() as shown:
            follow(Watcher(run, BackgroundQuery.about(run)), shown)
    except KeyboardInterrupt:
        note(f"\nthe test continues. Its verdict: hpcaccel test --report {run.run_id}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _show(_results_of(run), json=json, logs=run)


def _progress(run: RunDir) -> Callable[[], None]:
    """A function that prints the name of each check once a rank has begun it."""
    from hpcaccel.cli.selftest_ranks import CheckNames

    names = CheckNames(run.path / "selftest")
    return names.show


def _results_of(run: RunDir) -> SelftestResults:
    """The results of a test that ran as a job. Ranks that could not write them have printed them to their logs."""
    from hpcaccel.core.durable_files import read_lines
    from hpcaccel.core.launch_spec import read_launch
    from hpcaccel.view.selftest_results import read_results

    launch = read_launch(run)
    if not (run.path / "selftest").is_dir() and "hpcaccel.runtime.selftest" not in launch.program:
        raise UserError(f"{run.run_id} is not a self-test: it runs {' '.join(launch.program[:3])}")
    outputs = [path.read_text(errors="replace") for path in run.attempts.glob("*/*.log")]
    nodes = [line["nodes"] for line, _ in read_lines(run.ledger) if line["event"] == "start"]
    places = [node for node in nodes[-1] for _ in range(launch.ranks_per_node)] if nodes else []
    return read_results(run.path / "selftest", outputs=outputs, expected=launch.ranks, places=places)


def _show(results: SelftestResults, *, json: bool, logs: RunDir | None = None) -> NoReturn:
    """Print the verdict, and exit."""
    from hpcaccel.view.selftest_report import print_verdict, verdict_json
    from hpcaccel.view.selftest_verdict import judge

    verdict = judge(results)
    if json:
        print_json(verdict_json(verdict, results))
    else:
        print_verdict(verdict, results)
    sys.stdout.flush()
    if verdict.verdict == "bad" and logs is not None:
        note(f"logs of the ranks: hpcaccel logs {logs.run_id} --rank all")
    raise typer.Exit(EXIT_BAD if verdict.verdict == "bad" else 0)
