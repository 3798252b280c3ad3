"""What a sweep may ask for, and what may still be a surprise."""

from __future__ import annotations

from hpcaccel.spec.points import count
from hpcaccel.spec.sweep import SweepSpec

__all__ = ["notes"]


def notes(spec: SweepSpec) -> list[str]:
    """What is allowed but may be a surprise, a sentence each."""
    sweep, found = spec.sweep, []
    number = count(sweep.parameters)
    trials = None if number is None else number * sweep.repeat
    if sweep.method == "grid" and trials is not None and sweep.max_trials is not None and trials > sweep.max_trials:
        found.append(f"the grid has {trials:,} trials, and max_trials lets {sweep.max_trials:,} of them run, in order")
    if number == 1 and sweep.repeat == 1:
        found.append("the parameters hold one point only: there is nothing to search")
    if sweep.max_trials is not None and sweep.max_trials % sweep.repeat:
        usable = sweep.max_trials // sweep.repeat * sweep.repeat
        found.append(f"max_trials {sweep.max_trials} is no multiple of repeat {sweep.repeat}: {usable} trials will run")
    if sweep.max_trials is not None and sweep.workers * sweep.pack > sweep.max_trials:
        found.append(f"{sweep.workers} workers for {sweep.max_trials} trials: some will have nothing to do")
    if sweep.repeat > 1 and spec.job.entrypoint.kind == "command":
        found.append("repeat differs in runtime.seed only, which a command sees only if it uses hpcaccel.Accelerator")
    return found
