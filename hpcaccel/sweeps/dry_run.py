"""What a sweep would be, before there is one: what ``sweep start --dry-run`` tells."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from hpcaccel.errors import HpcaccelError
from hpcaccel.spec import SweepSpec
from hpcaccel.spec.points import count, equal, points
from hpcaccel.spec.trial_spec import own_point
from hpcaccel.submission.array_size import largest_array
from hpcaccel.submission.backend import SlurmBackend
from hpcaccel.sweeps.arrays import chunks
from hpcaccel.sweeps.start_sweep import PreparedSweep, trials_at_most

__all__ = ["Foresight", "foresee"]

SHOWN_POINTS = 10


@dataclass(frozen=True, kw_only=True)
class Foresight:
    """A sweep that has not been started."""

    name: str
    cluster: str
    path: str
    method: str
    trials: int | None
    """At most; None: until ``max_gpu_hours`` are used up."""
    space: int | None
    """The number of points; None: without end."""
    first_points: list[dict[str, Any]]
    """What is tried first, as far as that is known: all of a grid's points, or the first ones."""
    workers: int
    arrays: list[int]
    """The size of each array; one array unless the cluster takes no larger ones."""
    gpus_per_worker: int
    ranks_per_worker: int
    """What is counted where no GPUs are asked for."""
    gpu_hours_per_stay: float | None
    """What all workers cost from their start to their time limit; None without a limit."""
    max_gpu_hours: float | None
    files: list[str]
    """What would be made in ``path``."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def foresee(plan: PreparedSweep) -> Foresight:
    """What starting ``plan`` would do. Nothing is written."""
    job, sweep = plan.spec.job, plan.spec.sweep
    nodes = job.slurm.min_nodes
    gpus, ranks = nodes * job.slurm.node_gpus, nodes * job.ranks_per_node
    seconds = job.slurm.time_seconds
    return Foresight(
        name=plan.prepared.name,
        cluster=plan.prepared.cluster,
        path=str(plan.dir.path),
        method=sweep.method,
        trials=trials_at_most(plan.spec),
        space=count(sweep.parameters),
        first_points=_first_points(plan.spec),
        workers=plan.workers,
        arrays=_arrays(plan),
        gpus_per_worker=gpus,
        ranks_per_worker=ranks,
        gpu_hours_per_stay=None if seconds is None else plan.workers * (gpus or ranks) * seconds / 3600,
        max_gpu_hours=sweep.max_gpu_hours,
        files=_files(plan),
    )


def _first_points(spec: SweepSpec) -> list[dict[str, Any]]:
    known: list[dict[str, Any]] = []
    rest = points(spec.sweep.parameters) if spec.sweep.method == "grid" else iter(())
    for point in itertools.chain([own_point(spec), *spec.sweep.enqueue], rest):
        if point and not any(equal(point, other) for other in known):
            known.append(point)
        if len(known) == SHOWN_POINTS:
            break
    return known


def _arrays(plan: PreparedSweep) -> list[int]:
    backend = plan.prepared.backend
    if not isinstance(backend, SlurmBackend):
        return [plan.workers]
    try:
        most = largest_array(backend.slurm.config())
    except HpcaccelError:
        return [plan.workers]  # a controller that does not answer is no reason to know nothing
    return [len(piece) for piece in chunks(range(plan.workers), most)]


def _files(plan: PreparedSweep) -> list[str]:
    place, last = plan.dir, plan.workers - 1
    names = [place.spec_yaml, place.sweep, place.script, place.node_program, place.record, place.journal]
    code = plan.prepared.code
    copied = [] if code is None else [f"code/ ({len(code.files)} files, {code.total_bytes / 1e6:.1f} MB)"]
    workers = "workers/0/" if last == 0 else f"workers/0/ … workers/{last}/"
    return [*(path.name for path in names), *copied, workers, "trials/0/ …"]
