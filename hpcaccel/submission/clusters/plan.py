"""Estimates of where and when a job could start (``hpcaccel plan``), and the settings of ``submit --debug``."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import hpcaccel
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import SpecError, UserError
from hpcaccel.render import render
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.parsing import StartEstimate
from hpcaccel.spec import ClusterProfile, JobSpec, load_spec, spec_hash
from hpcaccel.spec.cluster.cluster_facts import Partition, SiteFacts
from hpcaccel.spec.job.node_counts import canonical_nodes
from hpcaccel.spec.job.quantities import canonical_time
from hpcaccel.spec.loading.workflow import over_profile, read_jobs
from hpcaccel.submission.clusters.checks import check_site
from hpcaccel.submission.clusters.limits import effective_account, groups

__all__ = [
    "DEBUG_MINUTES",
    "MOST_QUESTIONS",
    "Choice",
    "DebugJob",
    "ask_of_script",
    "debug_job",
    "plan_choices",
    "plan_jobs",
    "query_slurm",
]


MOST_QUESTIONS = 36
"""Maximum number of choices: each can cause a query to Slurm's controller, whose load sites want to keep low."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A partition and a number of nodes.

    ``start_time`` and ``asked`` are seconds since 1970. Node and GPU hours assume that the job uses its whole time
    limit, ``time_seconds``.
    """

    job: str = ""
    """The job's name, for a file with several jobs."""
    partition: str
    nodes: int
    """Number of nodes, including those of components."""
    gpus: int
    """Number of GPUs on all nodes together."""
    time_seconds: int | None
    start_time: float | None = None
    node_hours: float | None = None
    gpu_hours: float | None = None
    problem: str = ""
    """Why the job would not start, according to the facts or to Slurm."""
    asked: float = 0.0

    @property
    def waits_seconds(self) -> float | None:
        return None if self.start_time is None else max(0.0, self.start_time - self.asked)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "waits_seconds": self.waits_seconds}


def plan_jobs(file: Path, *, overrides: Sequence[str] = (), **options: Any) -> list[Choice]:
    """The choices for each job of a file, in order. Arguments and errors are those of :func:`plan_choices`."""
    jobs = read_jobs(file, overrides=overrides)
    if jobs is None:
        return plan_choices(file, overrides=overrides, **options)
    _refuse_too_many(len(jobs) * _count(options["partitions"], options["nodes"]))
    return [replace(one, job=job.name) for job in jobs for one in plan_choices(job, **options)]


def plan_choices(
    source: Path | JobSpec,
    *,
    partitions: Sequence[str],
    nodes: Sequence[str],
    overrides: Sequence[str] = (),
    profile: ClusterProfile | None = None,
    facts: SiteFacts | None = None,
    slurm: Slurm | None = None,
    on_query: Callable[[JobSpec], None] = lambda spec: None,
) -> list[Choice]:
    """A choice for every combination of ``partitions`` and ``nodes``, sorted by start time.

    Args:
        source: a spec file with one job, or one job of a file with several.
        partitions, nodes: the values to combine; if empty, the spec's own.
        facts: the cluster's facts; Slurm is not queried for choices that the facts rule out.
        on_query: called with the spec of each combination before the spec is checked and Slurm is queried.

    Raises:
        SpecError: the spec is invalid, or an item of ``nodes`` is not a number of nodes.
        UserError: there are more combinations than ``MOST_QUESTIONS``.
        ClusterError, SlurmCommandError: there is no Slurm here, or it does not respond.
    """
    _refuse_too_many(_count(partitions, nodes))
    slurm, found = slurm or Slurm(), []
    for place in partitions or [""]:
        for size in nodes or [""]:
            own = [f"slurm.partition={place}"] if place else []
            own += [f"slurm.nodes={_size(size)}"] if size else []
            if isinstance(source, JobSpec):
                spec = over_profile(source, profile, overrides=[*overrides, *own])
            else:
                spec = load_spec(source, overrides=[*overrides, *own], profile=profile)
            on_query(spec)
            found.append(_choice(spec, profile, facts, slurm))
    return sorted(found, key=lambda one: (one.start_time is None, one.start_time or 0.0))


def _count(partitions: Sequence[str], nodes: Sequence[str]) -> int:
    return max(1, len(partitions)) * max(1, len(nodes))


def _refuse_too_many(count: int) -> None:
    if count > MOST_QUESTIONS:
        raise UserError(
            f"{count} combinations are too many (at most {MOST_QUESTIONS}, because each one can query Slurm): "
            "give fewer partitions or node counts"
        )


def _size(text: str) -> str:
    try:
        return canonical_nodes(text.strip())
    except ValueError as error:
        raise SpecError(f"command line: --nodes {text!r} {error}") from None


def _choice(spec: JobSpec, profile: ClusterProfile | None, facts: SiteFacts | None, slurm: Slurm) -> Choice:
    found = [] if facts is None else check_site(spec, facts, with_ages=False)
    problems = [f"{one.key} {one.message}" for one in found if one.is_error]
    nodes, gpus, seconds = spec.total_nodes, spec.total_gpus, spec.slurm.time_seconds
    hours = None if seconds is None else seconds / 3600
    estimate = StartEstimate() if problems else query_slurm(spec, profile, slurm)
    return Choice(
        partition=spec.slurm.partition or estimate.partition or "(default)",
        nodes=nodes,
        gpus=gpus,
        time_seconds=seconds,
        start_time=estimate.start_time,
        node_hours=None if hours is None else hours * nodes,
        gpu_hours=None if hours is None else hours * gpus,
        problem="; ".join(problems) or estimate.refusal.partition("\n")[0].removeprefix("Slurm refused the job: "),
        asked=time.time(),
    )


def query_slurm(
    spec: JobSpec, profile: ClusterProfile | None, slurm: Slurm, *, tasks: int | None = None
) -> StartEstimate:
    """Run ``sbatch --test-only`` with the script of ``spec``.

    ``tasks`` is the size of an array, or None for a single job.

    Raises:
        ClusterError, SlurmCommandError: there is no Slurm here, or it does not respond.
    """
    text = render(
        spec,
        run_dir=RunDir(Path(tempfile.gettempdir()) / "hpcaccel-plan"),
        python=sys.executable,
        profile=profile,
        array_size=tasks,
        header={"spec": spec_hash(spec), "hpcaccel": hpcaccel.__version__},
    )
    return ask_of_script(text, slurm)


def ask_of_script(text: str, slurm: Slurm) -> StartEstimate:
    """Like :func:`query_slurm`, for the text of a script."""
    with tempfile.TemporaryDirectory(prefix="hpcaccel-plan-") as folder:
        script = Path(folder) / "job.sbatch"
        script.write_text(text, encoding="utf-8")
        return slurm.test_only(script)


DEBUG_MINUTES = 15
_NAMES = ("debug", "devel", "develop", "dev", "test", "testing", "short", "interactive")
"""Common names of debugging partitions and QOS, the most common first."""


@dataclass(frozen=True, kw_only=True)
class DebugJob:
    """The settings of a debugging job."""

    overrides: tuple[str, ...]
    where: str
    """A phrase for the note: the debugging partition or QOS, or why the spec's own partition is used."""

    def note(self, spec: JobSpec) -> str:
        """A note for the user. ``spec`` contains these settings, then the user's own."""
        back = "" if spec.resilience.requeue or spec.resilience.chain else ", not requeued"
        nodes = "one node" if spec.slurm.nodes in (None, "1") else f"{spec.slurm.nodes} nodes"
        if spec.components:
            nodes += f" plus the nodes of {', '.join(spec.components)}"
        return f"debugging: {nodes}, at most {spec.slurm.time}, {self.where}{back}"


def debug_job(spec: JobSpec, facts: SiteFacts | None) -> DebugJob:
    """The settings of a debugging job: at most 15 minutes, not requeued, named ``<name>-debug``.

    The ranks get one node, and so does each component. The job uses a debugging partition if the facts list one
    that is open to it, else a debugging QOS, else the spec's own partition.
    """
    minutes = _minutes(spec)
    place: list[str] = []
    partition = None if facts is None else _partition(spec, facts)
    qos = None if facts is None or partition is not None else _qos(spec, facts)
    if partition is not None:
        place = [f"slurm.partition={partition.name}", "slurm.qos=null"]
        minutes = min(minutes, partition.max_time_minutes or minutes)
        where = f"in partition {partition.name!r}"
    elif qos is not None:
        assert facts is not None
        place, where = [f"slurm.qos={qos}"], f"with QOS {qos!r}"
        found = facts.qos_named(qos)
        minutes = min(minutes, (found and found.max_wall_minutes) or minutes)
    else:
        stored = "no facts of this cluster are stored: run `hpcaccel cluster probe`"
        why = stored if facts is None else "the cluster's facts list no partition or QOS for debugging that you can use"
        where = f"in the spec's own partition ({why})"
    settings = [
        f"name={spec.name[:58]}-debug",
        "slurm.nodes=1",
        "slurm.nodelist=null",
        "slurm.time_min=null",
        f"slurm.time={canonical_time(str(minutes))}",
        "resilience.requeue=false",
        "resilience.chain=null",
        "resilience.restart_in_place=0",
    ]
    for name in spec.components:
        settings += [f"components.{name}.{key}" for key in ("slurm.nodes=1", "slurm.nodelist=null", *place)]
    return DebugJob(overrides=(*settings, *place), where=where)


def _minutes(spec: JobSpec) -> int:
    seconds = spec.slurm.time_seconds
    return DEBUG_MINUTES if seconds is None else max(1, min(DEBUG_MINUTES, seconds // 60))


def _partition(spec: JobSpec, facts: SiteFacts) -> Partition | None:
    """The debug partition, recognised by a usual name such as ``debug``. Only partitions that are up and accept the
    job are considered."""
    usable = [
        one
        for one in facts.partitions
        if one.state.upper() == "UP"
        and not one.root_only
        and one.min_nodes <= 1
        and not list(_closed(spec, facts, one))
    ]
    by_name = {name: one for one in usable for name in [one.name]}
    name = _first_of_its_kind(list(by_name))
    return None if name is None else by_name[name]


def _closed(spec: JobSpec, facts: SiteFacts, partition: Partition) -> Sequence[object]:
    without_qos = spec.model_copy(update={"slurm": spec.slurm.model_copy(update={"qos": None})})
    return list(groups(without_qos, facts, partition))


def _qos(spec: JobSpec, facts: SiteFacts) -> str | None:
    account = effective_account(spec, facts)
    return None if account is None else _first_of_its_kind(account.qos)


def _first_of_its_kind(names: Sequence[str]) -> str | None:
    for kind in _NAMES:
        for name in names:
            if kind in re.split(r"[^a-z]+", name.lower()):
                return name
    return None
