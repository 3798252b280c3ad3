"""The ledger of a run: one line when an attempt starts, one when it ends, and the caps that follow from it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.core.attempt_steps import LoggedSteps, complete_timing, read_steps
from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.records import (
    AttemptEnd,
    AttemptStart,
    Decision,
    Outcome,
    Reason,
    StopRequest,
    from_dict,
    pruned,
    to_dict,
)
from hpcaccel.core.run_dir import RunDir, append_line, read_json, read_lines
from hpcaccel.node.failures.causes import cause
from hpcaccel.node.launch_spec import Resilience

__all__ = ["Ledger", "how_far", "read_outcome", "read_stop"]

STUCK = 2
"""So many failures, or time limits, without a new checkpoint end a run: trying again would change nothing."""


@dataclass
class Ledger:
    """All attempts of a run, as read from ``attempts.jsonl``, and the only writer of new ones."""

    path: Path
    starts: list[AttemptStart]
    ends: list[AttemptEnd]

    @classmethod
    def read(cls, run: RunDir) -> Ledger:
        starts: list[AttemptStart] = []
        ends: list[AttemptEnd] = []
        for line, _ in read_lines(run.ledger):
            if line.get("event") == "start":
                starts.append(from_dict(AttemptStart, line))
            elif line.get("event") == "end":
                ends.append(from_dict(AttemptEnd, line))
        return cls(run.ledger, starts, ends)

    def start(self, line: AttemptStart) -> None:
        append_line(self.path, to_dict(line), sync=True)
        self.starts.append(line)

    def end(self, line: AttemptEnd) -> None:
        append_line(self.path, to_dict(line), sync=True)
        self.ends.append(line)

    @property
    def next_attempt(self) -> int:
        attempts = [line.attempt for line in self.starts] + [line.attempt for line in self.ends]
        return 1 + max(attempts, default=0)

    def unfinished(self) -> AttemptStart | None:
        """The last attempt, if it started and never ended in the ledger: its batch step was killed."""
        ended = {line.attempt for line in self.ends}
        if self.starts and self.starts[-1].attempt not in ended:
            return self.starts[-1]
        return None

    @property
    def last_word(self) -> AttemptEnd | None:
        """The line in which the run was written to be over or paused, or None."""
        return self.ends[-1] if self.ends and self.ends[-1].decision in ("end", "pause") else None

    def ended_by(self, job_id: str) -> AttemptEnd | None:
        """The line in which this very job wrote that nothing follows, or None."""
        if not self.ends or self.unfinished() is not None:
            return None
        last = self.ends[-1]
        mine = {line.attempt for line in self.starts if line.job_id == job_id}
        by_this_job = last.job_id == job_id or last.attempt in mine
        return last if by_this_job and last.decision in ("end", "pause") else None

    def _ends_of(self, jobs: Collection[str]) -> list[AttemptEnd]:
        # `hpcaccel resume` is a new job: a person looked at it, the counts begin anew.
        mine = {line.attempt for line in self.starts if line.job_id in jobs}
        return [line for line in self.ends if line.attempt in mine]

    def cap(self, jobs: Collection[str], limits: Resilience, *, last: AttemptEnd | None = None) -> str | None:
        """Why the run must end now by its caps, or None. Preemptions never count as failures.

        Args:
            jobs: those that count together: the job alone, or the links of its chain.
            last: an end that is about to be written, counted with the others.
        """
        ends = [*self._ends_of(jobs), *([last] if last else [])]
        ends = [line for line in ends if not _nobodys_fault(line)]
        failures = [line for line in ends if line.reason == "failed"]
        preemptions = [line for line in ends if line.reason == "preempted"]
        for reason, word in (("failed", "failures"), ("time_limit", "time limits")):
            stuck = [line for line in _since_progress(ends) if line.reason == reason]
            if sum(not _never_began(line) for line in stuck) >= STUCK:
                return f"{STUCK} {word} without a new checkpoint"
        if len(failures) >= limits.max_failures:
            return f"{_counted(len(failures), 'failure')} (resilience.max_failures: {limits.max_failures})"
        if limits.max_preemptions is not None and len(preemptions) > limits.max_preemptions:
            return f"{_counted(len(preemptions), 'preemption')} (resilience.max_preemptions: {limits.max_preemptions})"
        return None

    def close_lost(
        self,
        run: RunDir,
        *,
        reason: Reason | None = None,
        decision: Decision | None = None,
        killed: str = "the batch step",
        why: str = "",
    ) -> AttemptEnd | None:
        """Write the end of an attempt whose batch step was killed before it could, from what it left behind.

        Args:
            reason: what Slurm says of it, where that is known; ``why`` in words.
            killed: what was killed, where that is not the whole batch step.
        """
        start = self.unfinished()
        if start is None:
            return None
        stop = read_stop(run, start.attempt)
        line = AttemptEnd(
            attempt=start.attempt,
            time=time.time(),
            job_id=start.job_id,
            reason="pruned" if pruned(stop) else reason or (stop.reason if stop else "lost"),
            decision=_what_follows(stop, decision),
            detail=f"{killed} was killed before it could write its end" + (f": {why}" if why else ""),
            seconds=max(0.0, _last_sign(run, start.attempt) - start.time),
            **how_far(run, start.attempt),
        )
        with suppress(OSError):
            complete_timing(run, start.attempt)
        self.end(line)
        return line


def _what_follows(stop: StopRequest | None, known: Decision | None) -> Decision:
    """What somebody wanted to follow when the attempt was killed holds all the same; a cancel may be but a guess."""
    if pruned(stop):
        return "end"
    wish = stop.then if stop is not None else ""
    return "pause" if wish == "pause" else known or ("end" if wish == "cancel" else "requeue")


def _since_progress(ends: Sequence[AttemptEnd]) -> list[AttemptEnd]:
    """The last attempt that got further than all before it, and those that came after it."""
    found: list[AttemptEnd] = []
    furthest = 0
    for line in ends:
        reached = _reached(line)
        if reached > furthest:
            found, furthest = [], reached
        found.append(line)
    return found


def _reached(line: AttemptEnd) -> int:
    """The step up to which the training's work is known to be kept.

    A checkpoint says so. Of a program with checkpoints of its own, the step at which it began again does, by its first
    line in the metrics: so much it has found. Where nothing tells that, the step of its outcome has to do.
    """
    if line.resumed_step is None and line.first_logged is None:
        return max(line.checkpoint_step or 0, line.last_step or 0)
    return max(line.checkpoint_step or 0, line.resumed_step or 0, (line.first_logged or 1) - 1)


def _nobodys_fault(line: AttemptEnd) -> bool:
    """Whether a node was at fault, which the run keeps away from since: so many times are bounded by themselves."""
    return bool(line.nodes_excluded) and cause(line.error_class or "exit").innocent


def _never_began(line: AttemptEnd) -> bool:
    return cause(line.error_class or "exit").never_began


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def read_stop(run: RunDir, attempt: int) -> StopRequest | None:
    value = read_json(run.stop(attempt))
    return from_dict(StopRequest, value) if value else None


def read_outcome(run: RunDir, attempt: int) -> Outcome | None:
    value = read_json(run.outcome(attempt))
    return from_dict(Outcome, value) if value else None


def how_far(run: RunDir, attempt: int) -> dict[str, Any]:
    """The fields of an end line that say where the attempt began, how far it came, and what is saved of it."""
    steps = read_steps(run, attempt, LoggedSteps.of(Logged(run).read()).get(attempt))
    newest, outcome = checkpoint_files.newest(run.checkpoints), read_outcome(run, attempt)
    name, step = (newest.name, newest.step) if newest else (None, None)
    if outcome is not None and outcome.checkpoint is not None and checkpoint_files.step_of(outcome.checkpoint) is None:
        name, step = outcome.checkpoint, outcome.step  # a checkpoint of the program's own
    return {
        "resumed_step": steps.from_step,
        "last_step": steps.last_step,
        "first_logged": steps.first_logged,
        "checkpoint": name,
        "checkpoint_step": step,
    }


def _last_sign(run: RunDir, attempt: int) -> float:
    """When the attempt's folder last changed (seconds since the epoch): the best guess at a silent end."""
    try:
        return max((entry.stat().st_mtime for entry in run.attempt(attempt).iterdir()), default=0.0)
    except OSError:
        return 0.0
