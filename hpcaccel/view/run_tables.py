"""Runs on a terminal: the table of ``list``, the facts of ``status``, and the summary at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console

from hpcaccel.core.formatting import ago, clean, clock_time, duration, number, percent, rate, shortened, step_of
from hpcaccel.submission.runs.watch import describe_end
from hpcaccel.view.rank_states import RankState
from hpcaccel.view.run_overview import Overview, RunRow
from hpcaccel.view.text_tables import Cell, Column, Styled, console_for, print_facts, print_table
from hpcaccel.view.usage_table import usage_facts

__all__ = ["print_runs", "print_status", "state_text", "summary"]

_STYLE = {
    "running": "green",
    "starting": "green",
    "completed": "bold green",
    "complete": "bold green",
    "pruned": "green",
    "failed": "bold red",
    "lost": "bold red",
    "cancelled": "yellow",
    "paused": "cyan",
    "pending": "blue",
}


def print_runs(runs: Sequence[Overview | RunRow], *, stream: TextIO | None = None) -> None:
    """Print a line for each run, in the given order. A narrow terminal shows only run id, name, state and loss."""
    _print_runs(runs, Column(title="NAME"), console_for(stream))


def _print_runs(runs: Sequence[Overview | RunRow], called: Column, console: Console) -> None:
    columns = (
        Column(title="RUN"),
        called,
        Column(title="JOB", leaves=4),
        Column(title="STATE", shortens=3),
        Column(title="ATTEMPTS", right=True, leaves=2),
        Column(title="STEP", right=True, leaves=5),
        Column(title="LOSS", right=True),
        Column(title="CREATED", shortens=0, leaves=1),
    )
    print_table(columns, (_run(run, called.title) for run in runs), console=console)


def _run(run: Overview | RunRow, called: str) -> list[Cell | tuple[Cell, Cell]]:
    created = clock_time(run.created) if run.created else "-"
    return [
        run.run_id,
        clean(run.name) if called == "NAME" else _changed(run),
        run.job_id,
        (_state(run), state_text(run.state)),
        str(run.attempts),
        step_of(run.step, run.total_steps),
        "-" if run.last_loss is None else number(run.last_loss),
        (created, created.partition("-")[2] or created),
    ]


def print_status(run: Overview, *, stream: TextIO | None = None) -> None:
    """Print all facts about one run, with its attempts."""
    console = console_for(stream)
    print_facts(_facts(run), console=console)
    if run.history:
        console.print()
        _print_attempts(run, console)
    if run.tasks:
        console.print()
        _print_runs(run.tasks, Column(title="WITH", wraps=20), console)


def _state(run: Overview | RunRow) -> Styled:
    """The state, with the error class of a failure."""
    state, style = state_text(run.state)
    return Styled(f"{state} ({clean(run.error_class)})" if run.error_class else state, style)


def _changed(run: Overview | RunRow) -> str:
    return clean(" ".join(f"{key}={value}" for key, value in run.overrides.items()))


def _facts(run: Overview) -> list[tuple[str, Cell | Sequence[Cell]]]:
    state: list[Cell] = [_state(run)]
    if run.detail:
        state.append(f"  {clean(run.detail)}")
    rows: list[tuple[str, Cell | Sequence[Cell]]] = [
        ("run", run.run_id),
        ("name", clean(run.name)),
        ("state", state),
        *([("advice", clean(run.advice))] if run.advice else []),
        ("job", f"{run.job_id or '-'} ({clean(run.cluster or run.backend)})"),
        *_waiting(run),
        ("step", step_of(run.step, run.total_steps)),
        ("steps lost", str(run.steps_lost)),
        *_present(run),
    ]
    if run.ettr and run.goodput:
        goodput = f"{percent(run.goodput)} of the time with allocated nodes"
        rows.append(("training", f"{percent(run.ettr)} overall, {goodput} (see hpcaccel report)"))
    if run.slow_ranks:
        slow = [
            f"rank {one['rank']} on {clean(one['node'])} (takes {one['ratio']:g} times as long as the median rank "
            "for its own part of a step)"
            for one in run.slow_ranks
        ]
        rows.append(("slow ranks", Styled(", ".join(slow), "yellow")))
    rows += [(clean(name), number(value)) for name, value in run.values.items()]
    if run.metrics_warning:
        rows.append(("metrics", Styled(clean(run.metrics_warning), "yellow")))
    rows.append(("checkpoint", run.checkpoint or "-"))
    rows += usage_facts(run.usage, run.hints)
    rows.append(("directory", clean(run.path)))
    return rows


def _waiting(run: Overview) -> Iterator[tuple[str, str]]:
    """Since when a run waits for nodes, and when it will have them."""
    if run.queued_since is not None:
        yield "in queue", f"for {ago(run.queued_since).removesuffix(' ago')}"
    if run.estimated_start is not None:
        left = duration(run.estimated_start - time.time())
        yield "starts", f"about {clock_time(run.estimated_start)} (in {left}), as Slurm estimates it"


def _present(run: Overview) -> Iterator[tuple[str, Cell]]:
    """Pace, time left, and what a failure would cost now."""
    if run.steps_per_second is not None:
        parts = [f"{number(run.steps_per_second)} steps/s"]
        if run.tokens_per_second is not None:
            parts.append(f"{rate(run.tokens_per_second)} tokens/s")
        if run.eta_seconds is not None:
            parts.append(f"{duration(run.eta_seconds)} left to the last step")
        yield "pace", ", ".join(parts)
    if run.data_wait_share is not None:
        yield "data wait", f"{percent(run.data_wait_share)} of the time"
    if run.time_left_seconds is not None and run.deadline is not None:
        left = f"{duration(run.time_left_seconds)} left, until {clock_time(run.deadline)}"
        short = run.eta_seconds is not None and run.eta_seconds > run.time_left_seconds
        yield "time limit", f"{left}: the last step will not be reached before" if short else left
    if run.at_risk is not None:
        yield "at risk", run.at_risk.sentence
    silent = [one for one in run.ranks if one.state == "silent"]
    if silent:
        yield "silent", Styled(f"no heartbeats of {shortened([_place(one) for one in silent], 8)}", "yellow")
    blamed = [one for one in run.ranks if one.state == "blamed"]
    if blamed:
        yield "at fault", Styled(shortened([_place(one) for one in blamed], 8), "bold red")


def _place(rank: RankState) -> str:
    return clean(f"rank {rank.rank} on {rank.node}" if rank.node else f"rank {rank.rank}")


def _print_attempts(run: Overview, console: Console) -> None:
    columns = (
        Column(title="ATTEMPT", right=True),
        Column(title="STARTED", leaves=0),
        Column(title="TOOK", right=True, leaves=1),
        Column(title="FROM STEP", right=True),
        Column(title="HOW IT ENDED", wraps=30),
    )
    rows = [
        (
            str(attempt.number),
            clock_time(attempt.start.time) if attempt.start is not None else "-",
            duration(attempt.end.seconds) if attempt.end is not None else "-",
            attempt.origin or "-",
            describe_end(attempt.end) if attempt.end is not None else "-",
        )
        for attempt in run.history
    ]
    print_table(columns, rows, console=console)


def state_text(state: str) -> Styled:
    """The state of a run or a trial in its colour."""
    return Styled(state, _STYLE.get(state, ""))


def summary(run: Overview) -> str:
    """A run in a few lines: state, attempts, steps, first and last loss, checkpoint, and directory."""
    lines = [f"{clean(run.name)} {run.run_id}: {run.state}"]
    if run.state not in ("completed", "running", "pending"):
        lines.append(f"reason: {_reason(run)}")
    if run.advice:
        lines.append(f"advice: {clean(run.advice)}")
    if run.tasks:
        return "\n  ".join([*lines, *map(_task, run.tasks), f"run directory: {clean(run.path)}"])
    lines.append(f"attempts: {run.attempts}")
    if run.step is not None:
        lines.append(f"steps: {step_of(run.step, run.total_steps)}")
        lines.append(f"steps lost: {run.steps_lost}")
    if run.first_loss is not None and run.last_loss is not None:
        lines.append(f"loss: first {number(run.first_loss)}, last {number(run.last_loss)}")
    if run.checkpoint is not None:
        lines.append(f"checkpoint: {run.checkpoint}")
    lines.append(f"run directory: {clean(run.path)}")
    return "\n  ".join(lines)


def _task(task: Overview) -> str:
    changed = ", ".join(f"{key}={value}" for key, value in task.overrides.items())
    loss = "" if task.last_loss is None else f", loss {number(task.last_loss)}"
    return clean(f"{task.run_id} ({changed}): {task.state} at step {step_of(task.step, task.total_steps)}{loss}")


def _reason(run: Overview) -> str:
    last = run.history[-1].end if run.history else None
    if last is not None:
        return f"attempt {run.history[-1].number} {describe_end(last)}"
    return clean(run.detail or run.reason or "unknown")
