"""When would it start, and what would it cost: one spec in several partitions and sizes; nothing is submitted."""

from __future__ import annotations

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
from hpcaccel.slurm.start_estimates import StartEstimate
from hpcaccel.spec import ClusterProfile, JobSpec, load_spec, spec_hash
from hpcaccel.spec.quantities import canonical_nodes
from hpcaccel.spec.site import SiteFacts
from hpcaccel.spec.workflow import over_profile, read_jobs
from hpcaccel.submission.site.checks import check_site

__all__ = ["MOST_QUESTIONS", "Choice", "ask_of_script", "ask_slurm", "plan_choices", "plan_jobs"]

MOST_QUESTIONS = 36
"""Each choice is a question to the controller; sites ask for few."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One partition and size. Times are seconds since 1970; hours are those of a job that uses all of its time."""

    job: str = ""
    """Of a file with several jobs, its name."""
    partition: str
    nodes: int
    """Those of components too."""
    gpus: int
    """Of all nodes together."""
    time_seconds: int | None
    start_time: float | None = None
    node_hours: float | None = None
    gpu_hours: float | None = None
    problem: str = ""
    """Why it would not start, as the facts or Slurm say."""
    asked: float = 0.0

    @property
    def waits_seconds(self) -> float | None:
        return None if self.start_time is None else max(0.0, self.start_time - self.asked)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "waits_seconds": self.waits_seconds}


def plan_jobs(file: Path, *, overrides: Sequence[str] = (), **options: Any) -> list[Choice]:
    """The choices of a file's job, or of each of its jobs, those in their order; arguments as for
    :func:`plan_choices`, raises as that.
    """
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
    tell: Callable[[JobSpec], None] = lambda spec: None,
) -> list[Choice]:
    """Every combination of ``partitions`` and ``nodes``, the one that starts first in front.

    Args:
        source: a spec file with one job, or one job of a file with several.
        partitions, nodes: empty: as the spec has it.
        facts: of the cluster; what they forbid is not asked of Slurm.
        tell: called before each question, with what is asked about.

    Raises:
        SpecError: the spec is wrong, or one of the sizes is no number of nodes.
        UserError: more combinations than ``MOST_QUESTIONS``.
        ClusterError, SlurmCommandError: there is no Slurm here, or it does not answer.
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
            tell(spec)
            found.append(_choice(spec, profile, facts, slurm))
    return sorted(found, key=lambda one: (one.start_time is None, one.start_time or 0.0))


def _count(partitions: Sequence[str], nodes: Sequence[str]) -> int:
    return max(1, len(partitions)) * max(1, len(nodes))


def _refuse_too_many(count: int) -> None:
    if count > MOST_QUESTIONS:
        raise UserError(
            f"{count} combinations are too many questions to Slurm at a time (at most {MOST_QUESTIONS}): "
            "name fewer partitions or sizes"
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
    answer = StartEstimate() if problems else ask_slurm(spec, profile, slurm)
    return Choice(
        partition=spec.slurm.partition or answer.partition or "(default)",
        nodes=nodes,
        gpus=gpus,
        time_seconds=seconds,
        start_time=answer.start_time,
        node_hours=None if hours is None else hours * nodes,
        gpu_hours=None if hours is None else hours * gpus,
        problem="; ".join(problems) or answer.refusal.partition("\n")[0].removeprefix("Slurm refused the job: "),
        asked=time.time(),
    )


def ask_slurm(
    spec: JobSpec, profile: ClusterProfile | None, slurm: Slurm, *, tasks: int | None = None
) -> StartEstimate:
    """``sbatch --test-only`` with the script of ``spec``; of an array with so many ``tasks``.

    Raises:
        ClusterError, SlurmCommandError: there is no Slurm here, or it does not answer.
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
    """The same for a script that is there already; raises as :func:`ask_slurm`."""
    with tempfile.TemporaryDirectory(prefix="hpcaccel-plan-") as folder:
        script = Path(folder) / "job.sbatch"
        script.write_text(text, encoding="utf-8")
        return slurm.test_only(script)
