"""What a run's goodput would have been without its measures against faults, as far as the run itself has measured it.

Each row leaves one measure out, with the same faults at the same times:

- snapshots: steps that were in no checkpoint on the disk when an attempt continued from them would have been lost. The
  time that snapshots blocked training would not have been spent.
- warm restarts: the attempts whose ranks were forked would have taken as long for imports as this run's fastest
  attempt with new processes.
- spare nodes, fewer nodes: the job would have been requeued. How long it would have waited is not known, so neither is
  the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hpcaccel.core.durable_files import read_json, read_lines
from hpcaccel.core.formatting import counted, precise_duration, shortened
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.runs.attempts import Attempt
from hpcaccel.view.goodput import AttemptSpan, AttemptWork

__all__ = ["Without", "without_measures"]

MOST_NODES = 4
"""At most this many nodes are named in a line."""


@dataclass(frozen=True, kw_only=True)
class Without:
    """A run without one of its measures, or without all whose effect is known."""

    measure: str
    training_lost_seconds: float | None
    """Training that would have been lost; None if the effect of the measure is not known."""
    more_seconds: float | None
    """Time with nodes that the run would have needed in addition; negative if the measure itself took more."""
    goodput: float | None = None
    ettr: float | None = None
    counted: str
    """What the figures are based on."""
    not_counted: str
    """What they leave out, because no run can know it."""


@dataclass(frozen=True)
class _Kept:
    """The steps of an attempt that contribute to the result: after ``first``, up to ``last``."""

    first: int
    last: int
    step_seconds: float


def without_measures(
    run: RunDir,
    attempts: Sequence[Attempt],
    spans: Sequence[AttemptSpan],
    works: Sequence[AttemptWork],
    *,
    training: float,
    held: float,
    total: float,
) -> list[Without]:
    """A row for each measure that the spec sets, and one for all of them if several are known.

    Args:
        attempts, spans, works: the attempts that have started, oldest first, their spans and their time by part.
        training, held, total: seconds of training, with nodes, and since the submission without pauses.
    """
    spec: dict[str, Any] = (read_json(run.spec) or {}).get("spec", {})
    resilience = spec.get("resilience", {})
    rows = []
    if spec.get("checkpoint", {}).get("snapshot_every_steps"):
        rows.append(_without_snapshots(run, attempts, spans, works))
    if (warm := _without_warm_restarts(spans, works)) is not None:
        rows.append(warm)
    if resilience.get("spare_nodes"):
        rows.append(_without_new_places(spans, "spare nodes"))
    if resilience.get("on_node_loss") == "shrink":
        rows.append(_without_new_places(spans, "fewer nodes"))
    known = [row for row in rows if row.training_lost_seconds is not None and row.more_seconds is not None]
    if len(known) > 1:
        rows.append(
            Without(
                measure=" and ".join(row.measure for row in known),
                training_lost_seconds=sum(row.training_lost_seconds or 0.0 for row in known),
                more_seconds=sum(row.more_seconds or 0.0 for row in known),
                counted="the rows above together",
                not_counted="as above",
            )
        )
    return [_with_ratios(row, training=training, held=held, total=total) for row in rows]


def _with_ratios(row: Without, *, training: float, held: float, total: float) -> Without:
    if row.training_lost_seconds is None or row.more_seconds is None:
        return row
    left, more = max(0.0, training - row.training_lost_seconds), row.more_seconds
    return replace(row, goodput=_share(left, held + more), ettr=_share(left, total + more))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


# -- snapshots ------------------------------------------------------------------------------------------------------


def _without_snapshots(
    run: RunDir, attempts: Sequence[Attempt], spans: Sequence[AttemptSpan], works: Sequence[AttemptWork]
) -> Without:
    resumes = [
        (_on_disk(span), one.resumed_step)
        for one, span in zip(attempts, spans, strict=True)
        if one.resumed_from_memory and one.resumed_step is not None
    ]
    written = [found for span in spans for found in _written_at_stops(run, span)]
    ranges = [*resumes, *written]
    steps, seconds = 0, 0.0
    for kept in _kept(spans, works):
        number = _covered(ranges, kept.first, kept.last)
        steps, seconds = steps + number, seconds + number * kept.step_seconds
    cost = [one.timing.snapshot_seconds for one in spans if one.timing is not None]
    known = [each for each in cost if each is not None]
    events = [counted(len(resumes), "resume") + " from memory"] if resumes else []
    events += [counted(len(written), "snapshot") + " written to the disk at a stop"] if written else []
    what = f"{counted(steps, 'step')} in no other checkpoint: {', '.join(events)}" if events else "no snapshot was used"
    took = f"snapshots blocked training for {precise_duration(sum(known))}" if known else "their own cost is not known"
    return Without(
        measure="snapshots",
        training_lost_seconds=seconds,
        more_seconds=-sum(known),
        counted=f"{what}; {took}",
        not_counted="how much longer these loads would have taken from the disk",
    )


def _on_disk(span: AttemptSpan) -> int:
    """The step of the newest checkpoint when the attempt began; 0 if there was none."""
    return span.start.checkpoint_step or 0


def _written_at_stops(run: RunDir, span: AttemptSpan) -> Iterable[tuple[int, int]]:
    """Snapshots that an attempt wrote to the disk: pairs of the step of the checkpoint before, and their own step."""
    before = _on_disk(span)
    for line, _ in read_lines(run.saves(span.start.attempt)):
        if line.get("from_memory"):
            yield before, line["step"]
        before = max(before, line["step"])


def _kept(spans: Sequence[AttemptSpan], works: Sequence[AttemptWork]) -> Iterable[_Kept]:
    for span, work in zip(spans, works, strict=True):
        first = span.steps.from_step
        if first is not None and work.steps_kept:
            mean = work.seconds.get("training", 0.0) / work.steps_kept
            seconds = mean if work.step_seconds is None else min(mean, work.step_seconds)
            yield _Kept(first, first + work.steps_kept, seconds)


def _covered(ranges: Sequence[tuple[int, int]], first: int, last: int) -> int:
    """How many steps after ``first`` up to ``last`` are in any of ``ranges``. Each is counted once: without snapshots
    it would have been lost once, however many attempts continued from a later one."""
    steps, at = 0, first
    for begin, end in sorted(ranges):
        begin, end = max(begin, at), min(end, last)
        if end > begin:
            steps, at = steps + end - begin, end
    return steps


# -- warm restarts ----------------------------------------------------------------------------------------------------


def _without_warm_restarts(spans: Sequence[AttemptSpan], works: Sequence[AttemptWork]) -> Without | None:
    """None if no attempt began by fork."""
    imports: dict[bool, list[float]] = {True: [], False: []}
    for span, work in zip(spans, works, strict=True):
        if "imports" in work.seconds and span.timing is not None and span.timing.imported is not None:
            imports[span.start.warm].append(work.seconds["imports"])
    warm, cold = imports[True], min(imports[False], default=None)
    if not warm:
        return None
    mean = precise_duration(sum(warm) / len(warm))
    began = f"{counted(len(warm), 'attempt')} began by fork, with {mean} of imports{' on average' * (len(warm) > 1)}"
    instead = "no attempt with new processes to compare with"
    if cold is not None:
        instead = f"{precise_duration(cold)} is the shortest of this run's new processes"
    return Without(
        measure="warm restarts",
        training_lost_seconds=None if cold is None else 0.0,
        more_seconds=None if cold is None else sum(cold - seconds for seconds in warm),
        counted=f"{began}; {instead}",
        not_counted="the start of a new job step; what the parents' own imports took from the first attempt",
    )


# -- lost nodes -------------------------------------------------------------------------------------------------------


def _without_new_places(spans: Sequence[AttemptSpan], measure: str) -> Without:
    """Restarts of the ranks in the same job without some of their nodes: on as many nodes, or on fewer."""
    gone: list[str] = []
    starts = 0
    for before, after in pairwise(spans):
        if before.end is None or before.end.decision != "restart" or before.start.job_id != after.start.job_id:
            continue
        left_out = [node for node in before.start.nodes if node not in after.start.nodes]
        shrunk = len(after.start.nodes) < len(before.start.nodes)
        if left_out and shrunk == (measure == "fewer nodes"):
            starts, gone = starts + 1, [*gone, *left_out]
    what = "no node was left out"
    if starts:
        what = f"{counted(starts, 'restart')} in the same job without {shortened(gone, MOST_NODES)}"
    largest = max((len(span.start.nodes) for span in spans), default=0)
    fewer = sum(max(0.0, span.ended - span.start.time) for span in spans if len(span.start.nodes) < largest)
    if measure == "fewer nodes" and fewer:
        what += f"; {precise_duration(fewer)} on fewer than {counted(largest, 'node')}"
    return Without(
        measure=measure,
        training_lost_seconds=None,
        more_seconds=None,
        counted=what,
        not_counted="the time in the queue: after each loss, and before the first start, for another number of nodes",
    )
