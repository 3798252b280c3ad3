"""What a sweep may ask for, and what may still be a surprise."""

from __future__ import annotations

import difflib

from hpcaccel.spec.overrides import setting_path
from hpcaccel.spec.points import count
from hpcaccel.spec.sweep_fields import SweepSpec
from hpcaccel.spec.trial_spec import MISSING, layer_of, value_at

__all__ = ["notes"]


def notes(spec: SweepSpec) -> list[str]:
    """What is allowed but may be a surprise, a sentence each."""
    sweep, found = spec.sweep, []
    number = count(sweep.parameters)
    trials = None if number is None else number * sweep.repeat
    if sweep.method == "grid" and trials is not None and sweep.max_trials is not None and trials > sweep.max_trials:
        found.append(f"the grid has {trials:,} trials, and max_trials lets {sweep.max_trials:,} of them run, in order")
    found += _strange_names(spec)
    if number == 1 and sweep.repeat == 1:
        found.append("the parameters hold one point only: there is nothing to search")
    if sweep.max_trials is not None and sweep.max_trials % sweep.repeat:
        usable = sweep.max_trials // sweep.repeat * sweep.repeat
        found.append(f"max_trials {sweep.max_trials} is no multiple of repeat {sweep.repeat}: {usable} trials will run")
    most = min((end for end in (trials, sweep.max_trials) if end is not None), default=None)
    if most is not None and (needed := max(1, -(-most // sweep.pack))) < sweep.workers:
        found.append(f"for {most} trial{'s'[: most > 1]} at most, {needed} of {sweep.workers} workers will be started")
    if sweep.repeat > 1 and spec.job.entrypoint.kind == "command":
        found.append("repeat differs in runtime.seed only, which a command sees only if it uses hpcaccel.Accelerator")
    return found


def _strange_names(spec: SweepSpec) -> list[str]:
    """Arguments that are not the spec's own and look much like one that is: nobody else can tell a slip of the pen."""
    layer, own = layer_of(spec.job), spec.job.entrypoint.args
    found = []
    for name in spec.sweep.parameters:
        path = setting_path(name, layer)
        if path[:2] != ("entrypoint", "args") or value_at(layer, path) is not MISSING or not isinstance(own, dict):
            continue
        if alike := difflib.get_close_matches(str(path[-1]), map(str, own), n=1):
            found.append(f"{name} is none of the spec's own args, which the program must know. Is it args.{alike[0]}?")
    return found
