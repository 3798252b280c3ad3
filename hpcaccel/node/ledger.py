"""The ledger of a run, with one line for each start and each end of an attempt, and the caps computed from it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files.watched import newest_saved
from hpcaccel.core.attempt_steps import LoggedSteps, complete_timing, read_steps
from hpcaccel.core.durable_files import append_line, read_json
from hpcaccel.core.formatting import counted
from hpcaccel.core.launch_spec import RestartPolicy
from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.rank_records import Outcome
from hpcaccel.core.records import AttemptEnd, AttemptStart, Decision, Reason, from_dict, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.run_ledger import RunLedger
from hpcaccel.core.stop_requests import StopRequest, pruned
from hpcaccel.node.failures import cause

__all__ = ["Ledger", "how_far", "read_outcome", "read_stop"]

L = TypeVar("L", bound="Ledger")

STUCK = 2
"""A run ends after this number of failures, or of attempts ended by the time limit, without a new checkpoint."""


@dataclass(kw_only=True)
class Ledger(RunLedger):
    """A run's ledger, with methods to append lines. The batch step is the only process that writes it."""

    path: Path

    @classmethod
    def of(cls: type[L], run: RunDir) -> L:
        """Read the ledger of ``run`` for appending."""
        found = cls(path=run.ledger)
        found.read_lines(run.ledger)
        return found

    def start(self, line: AttemptStart) -> None:
        self._append(line)

    def end(self, line: AttemptEnd) -> None:
        self._append(line)

    def _append(self, line: AttemptStart | AttemptEnd) -> None:
        append_line(self.path, to_dict(line), sync=True)
        self.add(to_dict(line))

    def cap(self, jobs: Collection[str], limits: RestartPolicy, *, last: AttemptEnd | None = None) -> str | None:
        """The cap that is reached, so that the run ends, as a phrase for the user; None if no cap is reached.

        Preemptions never count as failures.

        Args:
            jobs: IDs of the jobs whose end lines are counted: this job alone, or all jobs of its chain.
            last: an end line that also counts, although it has not been written yet.
        """
        ends = [*self.ends_of(jobs), *([last] if last else [])]
        ends = [line for line in ends if not _nobodys_fault(line)]
        failures = [line for line in ends if line.reason == "failed"]
        preemptions = [line for line in ends if line.reason == "preempted"]
        for reason, word in (("failed", "failures"), ("time_limit", "attempts ended by the time limit")):
            stuck = [line for line in _since_progress(ends) if line.reason == reason]
            if sum(not _never_began(line) for line in stuck) >= STUCK:
                return f"{STUCK} {word} without a new checkpoint"
        if failures and len(failures) >= limits.max_failures:
            return f"{counted(len(failures), 'failure')} (resilience.max_failures: {limits.max_failures})"
        if limits.max_preemptions is not None and len(preemptions) > limits.max_preemptions:
            return f"{counted(len(preemptions), 'preemption')} (resilience.max_preemptions: {limits.max_preemptions})"
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
        """Write the end line of an attempt whose batch step was killed before it could write this line.

        The values are taken from the attempt's files. Returns the line, or None if no attempt lacks an end line.

        Args:
            reason: why Slurm ended the job, if known; default: the reason of the last stop request, else ``lost``. For
                a pruned trial the reason is always ``pruned``.
            decision: what follows, unless a pause or a prune was requested; default: ``end`` if the last stop request
                was a cancel, else ``requeue``.
            killed: names the process that was killed, for the line's ``detail``.
            why: further explanation, for the line's ``detail``.
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
            detail=f"{killed} was killed before it could record the end" + (f": {why}" if why else ""),
            seconds=max(0.0, _last_sign(run, start.attempt) - start.time),
            **how_far(run, start.attempt, ends=self.ends),
        )
        with suppress(OSError):
            complete_timing(run, start.attempt)
        self.end(line)
        return line


def _what_follows(stop: StopRequest | None, known: Decision | None) -> Decision:
    """The decision after an attempt that was killed. A pause in ``stop`` overrides ``known``. ``known`` overrides a
    cancel in ``stop``, because that cancel may be a guess from signals alone."""
    if pruned(stop):
        return "end"
    wish = stop.then if stop is not None else ""
    return "pause" if wish == "pause" else known or ("end" if wish == "cancel" else "requeue")


def _since_progress(ends: Sequence[AttemptEnd]) -> list[AttemptEnd]:
    """The end lines of the last attempt that got further than all earlier ones, and of the attempts after it; all of
    ``ends`` if no attempt got further."""
    found: list[AttemptEnd] = []
    furthest = 0
    checkpoint: tuple[str | None, float | None] = (None, None)
    for line in ends:
        reached = _reached(line)
        without_step = line.checkpoint is not None and line.checkpoint_step is None
        now = (line.checkpoint, line.checkpoint_time)
        if reached > furthest or (without_step and now != checkpoint):
            found, furthest = [], max(reached, furthest)
        checkpoint = now
        found.append(line)
    return found


def _reached(line: AttemptEnd) -> int:
    """The last step that is assumed to be saved.

    This is the step of the newest checkpoint, or the step from which this attempt resumed if that is later. A program
    that writes its own checkpoints is assumed to have resumed just before the first step in its metrics. If neither the
    resumed step nor such a first step is recorded, the last step that the attempt has done counts.
    """
    if line.resumed_step is None and line.first_logged is None:
        return max(line.checkpoint_step or 0, line.last_step or 0)
    return max(line.checkpoint_step or 0, line.resumed_step or 0, (line.first_logged or 1) - 1)


def _nobodys_fault(line: AttemptEnd) -> bool:
    """Whether a node caused the failure and was excluded. Such an attempt does not count towards the caps, because the
    number of excluded nodes has a limit of its own."""
    return bool(line.nodes_excluded) and cause(line.error_class or "exit").innocent


def _never_began(line: AttemptEnd) -> bool:
    return cause(line.error_class or "exit").never_began


def read_stop(run: RunDir, attempt: int) -> StopRequest | None:
    value = read_json(run.stop(attempt))
    return from_dict(StopRequest, value) if value else None


def read_outcome(run: RunDir, attempt: int) -> Outcome | None:
    value = read_json(run.outcome(attempt))
    return from_dict(Outcome, value) if value else None


def how_far(run: RunDir, attempt: int, *, ends: Sequence[AttemptEnd]) -> dict[str, Any]:
    """The end line's fields about the attempt's progress: where it resumed, its steps, and the newest checkpoint.

    Args:
        ends: end lines of earlier attempts.
    """
    steps = read_steps(run, attempt, LoggedSteps.of(Logged(run).read()).get(attempt))
    newest, outcome = newest_saved(run, ends), read_outcome(run, attempt)
    name, step = (newest.name, newest.step) if newest else (None, None)
    if outcome is not None and outcome.checkpoint is not None and checkpoint_files.step_of(outcome.checkpoint) is None:
        name, step = outcome.checkpoint, outcome.step  # the program's own checkpoint
    return {
        "resumed_step": steps.from_step,
        "resumed_from": (read_json(run.progress(attempt)) or {}).get("resumed_from"),
        "last_step": steps.last_step,
        "first_logged": steps.first_logged,
        "checkpoint": name,
        "checkpoint_step": step,
        "checkpoint_time": None if newest is None or name != newest.name else newest.time,
    }


def _last_sign(run: RunDir, attempt: int) -> float:
    """When the newest file in the attempt's folder was last changed (seconds since the epoch): an estimate of when the
    attempt was killed. 0 if there is no file."""
    try:
        return max((entry.stat().st_mtime for entry in run.attempt(attempt).iterdir()), default=0.0)
    except OSError:
        return 0.0
