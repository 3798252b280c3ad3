"""The ledger of a run: one line when an attempt starts, one when it ends, and the caps that follow from it."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hpcaccel import layout
from hpcaccel.logged import Logged
from hpcaccel.node.causes import cause
from hpcaccel.node.launch import Resilience
from hpcaccel.records import (
    AttemptEnd,
    AttemptStart,
    Decision,
    Outcome,
    Progress,
    Reason,
    StopRequest,
    from_dict,
    pruned,
    to_dict,
)
from hpcaccel.rundir import RunDir, append_line, read_json, read_lines

__all__ = ["Ledger", "last_step", "read_outcome", "read_stop"]

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

    def ended_by(self, job_id: str) -> AttemptEnd | None:
        """The line in which this very job wrote that nothing follows, or None."""
        if not self.ends or self.unfinished() is not None:
            return None
        last = self.ends[-1]
        mine = {line.attempt for line in self.starts if line.job_id == job_id}
        return last if last.attempt in mine and last.decision in ("end", "pause") else None

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
        if ends:
            newest = ends[-1].checkpoint_step
            for reason, word in (("failed", "failures"), ("time_limit", "time limits")):
                stuck = [line for line in ends if line.reason == reason and line.checkpoint_step == newest]
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
        stop, outcome = read_stop(run, start.attempt), read_outcome(run, start.attempt)
        newest = layout.newest(run.checkpoints)
        line = AttemptEnd(
            attempt=start.attempt,
            time=time.time(),
            reason="pruned" if pruned(stop) else reason or (stop.reason if stop else "lost"),
            decision=_what_follows(stop, decision),
            detail=f"{killed} was killed before it could write its end" + (f": {why}" if why else ""),
            seconds=max(0.0, _last_sign(run, start.attempt) - start.time),
            resumed_step=resumed_step(run, start.attempt),
            last_step=outcome.step if outcome else last_step(run, start.attempt),
            checkpoint=newest.name if newest else None,
            checkpoint_step=newest.step if newest else None,
        )
        self.end(line)
        return line


def _what_follows(stop: StopRequest | None, known: Decision | None) -> Decision:
    """What somebody wanted to follow when the attempt was killed holds all the same; a cancel may be but a guess."""
    if pruned(stop):
        return "end"
    wish = stop.then if stop is not None else ""
    return "pause" if wish == "pause" else known or ("end" if wish == "cancel" else "requeue")


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


def resumed_step(run: RunDir, attempt: int) -> int:
    value = read_json(run.progress(attempt))
    return from_dict(Progress, value).resumed_step if value else 0


def last_step(run: RunDir, attempt: int) -> int | None:
    """The last step that this attempt wrote a metric for, or None."""
    return max((line.step for line in Logged(run).read() if line.attempt == attempt), default=None)


def _last_sign(run: RunDir, attempt: int) -> float:
    """When the attempt's folder last changed (seconds since the epoch): the best guess at a silent end."""
    try:
        return max((entry.stat().st_mtime for entry in run.attempt(attempt).iterdir()), default=0.0)
    except OSError:
        return 0.0
