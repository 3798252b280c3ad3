"""Lines about one run or one sweep for a terminal of any width, from its overview."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from hpcaccel.core.formatting import (
    ago,
    clean,
    clock_time,
    counted,
    duration,
    gpu_hours,
    number,
    percent,
    precise_duration,
    rate,
    size,
    step_of,
)
from hpcaccel.submission.runs.watch import describe_end
from hpcaccel.view.life_bar import LifePart
from hpcaccel.view.rank_states import RankState, blame_of
from hpcaccel.view.run_overview import Overview
from hpcaccel.view.run_tables import state_text
from hpcaccel.view.sweep_view import SweepView

__all__ = ["life_line", "rank_lines", "run_lines", "sparkline", "sweep_lines"]

LABEL = 10
"""Width of the labels."""
SPACE = "   "
"""Between facts on a line."""
_CONSOLE = Console(force_terminal=False)
"""Only for wrapping; nothing is printed on it."""
_BARS = "▁▂▃▄▅▆▇█"
_LIFE = {
    "queued": ("·", "bright_black"),
    "starting": ("░", "yellow"),
    "training": ("█", "blue"),
    "saving": ("▓", "cyan"),
    "lost": ("x", "red"),
    "hung": ("!", "magenta"),
    "paused": ("─", "bright_black"),
}
"""Sign and colour of each part of a run's life: the signs differ, for terminals without colours."""
_RANKS = {"ok": ("●", "green"), "slow": ("s", "bold yellow"), "silent": ("?", "bold red"), "blamed": ("X", "bold red")}
_ENDED, _IDLE = ("·", "bright_black"), ("i", "yellow")
_LEGEND = "● working  s slow  ? silent  X at fault  i idle GPU"
MOST_ATTEMPTS = 4
SHOWN_TRACEBACK = 8
"""Number of lines of a traceback at the top."""
MOST_TASKS = 12


def sparkline(values: Sequence[float], width: int) -> str:
    """``values`` as at most ``width`` bars; neighbours are averaged if there are more. Values that are not finite are
    left out."""
    known = [value for value in values if math.isfinite(value)]
    if not known or width < 1:
        return ""
    count = min(width, len(known))
    means = []
    for place in range(count):
        part = known[place * len(known) // count : (place + 1) * len(known) // count]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    span = high - low
    return "".join(_BARS[3 if span <= 0 else round((value - low) / span * (len(_BARS) - 1))] for value in means)


def life_line(parts: Sequence[LifePart], width: int) -> Text:
    """The bar of a run's life. A short loss or hang is drawn one character wide."""
    bar = Text()
    if not parts or width < 1:
        return bar
    first, last = parts[0].started, max(part.ended for part in parts)
    cell = (last - first) / width
    for place in range(width):
        begin, end = first + place * cell, first + (place + 1) * cell
        inside = [part for part in parts if part.ended > begin and part.started < end] or [parts[-1]]
        bad = [part for part in inside if part.part in ("lost", "hung")]
        shown = (bad or sorted(inside, key=lambda part: -_shared(part, begin, end)))[0]
        bar.append(*_LIFE.get(shown.part, ("?", "")))
    return bar


def _shared(part: LifePart, begin: float, end: float) -> float:
    return min(part.ended, end) - max(part.started, begin)


def rank_lines(ranks: Sequence[RankState], width: int) -> list[Text]:
    """A line for each node with a character for each of its ranks, and a line for each rank that is not working."""
    nodes: dict[str, list[RankState]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node or "?", []).append(rank)
    name = min(max((len(node) for node in nodes), default=0), 16)
    lines: list[Text] = []
    for node, own in nodes.items():
        line = Text(f"{clean(node)[:name]:<{name}} ")
        for rank in own[: max(1, width - name - 1)]:
            line.append(*_sign(rank))
        lines.append(line)
    odd = [rank for rank in ranks if rank.state not in ("ok", "ended") or rank.idle_gpu]
    for rank in odd[:6]:
        about = [] if rank.state in ("ok", "ended") else ["at fault" if rank.state == "blamed" else rank.state]
        about += [f"{rank.ratio:g} times the median"] if rank.ratio is not None else []
        about += [f"waits in {clean(rank.waits_in)}"] if rank.waits_in else []
        about += ["its GPU is idle"] if rank.idle_gpu else []
        lines.append(Text(f"rank {rank.rank} on {clean(rank.node or '?')}: {', '.join(about)}", style="yellow"))
    if odd:
        lines.append(Text(_LEGEND, style="dim"))
    return lines


def _sign(rank: RankState) -> tuple[str, str]:
    if rank.idle_gpu and rank.state in ("ok", "ended"):
        return _IDLE
    return _RANKS.get(rank.state, _ENDED)


def run_lines(run: Overview, *, width: int, traceback: tuple[int, str] | None = None) -> Text:
    """Everything about a run that fits a terminal of ``width`` columns; longer sentences wrap."""
    room = max(20, width - LABEL)
    lines = [*_state_lines(run), *_failure_lines(run, traceback), *_progress_lines(run, room), *_time_lines(run)]
    if run.life:
        sums: dict[str, float] = {}
        for part in run.life:
            sums[part.part] = sums.get(part.part, 0.0) + part.ended - part.started
        lines.append(_labelled("life", life_line(run.life, room)))
        legend = Text()
        for name, seconds in sums.items():
            sign, style = _LIFE.get(name, ("?", ""))
            legend.append(sign, style).append(f" {name} {duration(seconds)}  ")
        lines.append(_labelled("", legend))
    if run.at_risk is not None:
        lines.append(_labelled("at risk", run.at_risk.sentence))
    strip = rank_lines(run.ranks, room)
    lines += [_labelled("ranks" if place == 0 else "", line) for place, line in enumerate(strip)]
    lines += list(_usage_lines(run))
    lines += [_labelled("advice" if place == 0 else "", hint) for place, hint in enumerate(run.hints)]
    lines += list(_attempt_lines(run))
    lines += [_labelled("note", Text(clean(run.note), style="yellow"))] if run.note else []
    shown = _laid_out(lines, room)
    if traceback is not None and traceback[1].count("\n") >= SHOWN_TRACEBACK:
        shown.append(f"\n\n{blame_of(traceback[0], run.ranks, run.error_class)}:", "bold red")
        shown.append("".join(f"\n{_plain(line)}" for line in traceback[1].splitlines()))
    return shown


def _labelled(label: str, value: Text | str) -> tuple[str, Text]:
    return label, value if isinstance(value, Text) else Text(clean(value))


def _laid_out(lines: Iterable[tuple[str, Text]], room: int) -> Text:
    """Labels in a column, values beside them; long values wrap inside their column."""
    found: list[Text] = []
    for label, value in lines:
        for place, part in enumerate(value.wrap(_CONSOLE, room) or [Text()]):
            part.rstrip()
            found.append(Text().append(f"{label if place == 0 else '':<{LABEL}}", "dim").append_text(part))
    return Text("\n").join(found)


def _plain(line: str) -> str:
    return clean(line.expandtabs(4))


def _state_lines(run: Overview) -> Iterator[tuple[str, Text]]:
    state = state_text(run.state)
    line = Text(state.text, style=f"bold {state.style}".replace("bold bold", "bold"))
    if run.error_class:
        line.append(f" ({clean(run.error_class)})")
    if run.detail:
        line.append(f"  {clean(run.detail)}", style="not bold default")
    yield _labelled("state", line)
    if run.advice:
        yield _labelled("to do", run.advice)
    if run.queued_since is not None:
        yield _labelled("waiting", f"since {clock_time(run.queued_since)} ({ago(run.queued_since)})")
    if run.estimated_start is not None:
        yield _labelled("starts", f"about {clock_time(run.estimated_start)} (Slurm's present estimate)")


def _failure_lines(run: Overview, traceback: tuple[int, str] | None) -> Iterator[tuple[str, Text]]:
    """The end of the traceback; a longer one follows as a whole below everything else."""
    if traceback is not None:
        yield _labelled("failed", Text(f"{blame_of(traceback[0], run.ranks, run.error_class)}:", "bold red"))
        for line in traceback[1].splitlines()[-SHOWN_TRACEBACK:]:
            yield _labelled("", Text(_plain(line)))


def _progress_lines(run: Overview, room: int) -> Iterator[tuple[str, Text]]:
    words = [f"step {step_of(run.step, run.total_steps)}"]
    if run.step is not None and run.total_steps:
        share = min(1.0, run.step / run.total_steps)
        words.append(percent(share))
    words += [f"{number(run.steps_per_second)} steps/s"] if run.steps_per_second is not None else []
    words += [f"{rate(run.tokens_per_second)} tokens/s"] if run.tokens_per_second is not None else []
    words += [f"ready in {duration(run.eta_seconds)}"] if run.eta_seconds is not None else []
    yield _labelled("progress", SPACE.join(words))
    if run.step is not None and run.total_steps:
        full = round(room * min(1.0, run.step / run.total_steps))
        yield _labelled("", Text("━" * full, style="green").append("─" * (room - full), "bright_black"))
    if run.last_loss is not None:
        first = "" if run.first_loss is None else f" from {number(run.first_loss)}"
        losses = f"{number(run.last_loss)}{first}  "
        bars = sparkline([value for _, value in run.loss_tail], room - len(losses))
        yield _labelled("loss", Text(losses).append(bars, "blue"))


def _time_lines(run: Overview) -> Iterator[tuple[str, Text]]:
    place = [
        f"job {run.job_id}" if run.job_id else "",
        run.cluster or run.backend,
        run.partition,
        ", ".join(run.nodes[:4]),
    ]
    if len(run.nodes) > 4:
        place[-1] += f" and {len(run.nodes) - 4} more"
    yield _labelled("job", SPACE.join(part for part in place if part))
    words = [counted(run.attempts, "attempt")]
    words += [f"{run.steps_lost} steps lost"] if run.steps_lost else []
    words += [f"{duration(run.time_left_seconds)} left in the job"] if run.time_left_seconds is not None else []
    words += [f"goodput {percent(run.goodput)}"] if run.goodput else []
    words += [f"{percent(run.data_wait_share)} waiting for data"] if run.data_wait_share is not None else []
    words += [f"last save {run.checkpoint}"] if run.checkpoint else []
    yield _labelled("attempts", SPACE.join(words))


def _usage_lines(run: Overview) -> Iterator[tuple[str, Text]]:
    if run.usage is None:
        return
    for node in run.usage.nodes[:4]:
        words = [node.node]
        words += [f"CPUs {percent(node.cpu_share)}"] if node.cpu_share is not None else []
        if node.memory_peak_bytes is not None:
            limit = f" of {size(node.memory_limit_bytes)}" if node.memory_limit_bytes else ""
            words.append(f"memory at most {size(node.memory_peak_bytes)}{limit}")
        yield _labelled("usage", SPACE.join(words))
    gpus = run.usage.gpus
    known = [gpu.mean_utilization for gpu in gpus if gpu.mean_utilization is not None]
    if gpus:
        words = [counted(len(gpus), "GPU")]
        words += [f"{sum(known) / len(known):.0f} % on average"] if known else []
        words += [f"{gpu_hours(run.usage.idle_gpu_hours)} GPU-hours idle"] if run.usage.idle_gpu_hours else []
        words += [f"{number(run.usage.energy_kwh)} kWh"] if run.usage.energy_kwh is not None else []
        yield _labelled("GPUs", SPACE.join(words))


def _attempt_lines(run: Overview) -> Iterator[tuple[str, Text]]:
    ended = [one for one in run.history if one.end is not None]
    for place, one in enumerate(reversed(ended[-MOST_ATTEMPTS:])):
        assert one.end is not None
        yield _labelled("history" if place == 0 else "", f"attempt {one.number} {describe_end(one.end)}")
    for task in run.tasks[:MOST_TASKS]:
        changed = " ".join(f"{key}={value}" for key, value in task.overrides.items())
        yield _labelled("task", f"{task.run_id}  {task.state}  step {step_of(task.step, task.total_steps)}  {changed}")
    if len(run.tasks) > MOST_TASKS:
        yield _labelled("", f"and {len(run.tasks) - MOST_TASKS} more tasks")


def sweep_lines(sweep: SweepView, *, width: int) -> Text:
    """The state of a sweep, its best trial, and its rungs."""
    room = max(20, width - LABEL)
    state = state_text(sweep.state)
    lines = [_labelled("state", Text(state.text, style=state.style).append(f"  {clean(sweep.detail)}"))]
    counts = SPACE.join(f"{count} {name}" for name, count in sweep.trials.items() if count)
    lines.append(_labelled("trials", counts or "none yet"))
    if sweep.best is not None:
        lines.append(_labelled("best", f"{sweep.metric} {number(sweep.best.value)}, trial {sweep.best.number}"))
        lines += [_labelled("", f"{name} = {value}") for name, value in sweep.best.params.items()]
        bars = sparkline([value for _, value in sweep.best_so_far], room)
        lines.append(_labelled("best so far", Text(" ").append(bars, "blue")))
    budget = "" if sweep.budget_gpu_hours is None else f" of {gpu_hours(sweep.budget_gpu_hours)}"
    left = "" if sweep.seconds_left is None else f"   about {precise_duration(sweep.seconds_left)} left"
    lines.append(_labelled("GPU-hours", f"{gpu_hours(sweep.gpu_hours)}{budget}{left}"))
    most = max((rung.entered for rung in sweep.rungs), default=0)
    for place, rung in enumerate(sweep.rungs):
        full = round((room - 30) * rung.entered / most) if most and room > 40 else 0
        text = Text("█" * full, style="blue").append(
            f" step {rung.step}: {rung.entered}, {rung.promoted} went on", "default"
        )
        lines.append(_labelled("rungs" if place == 0 else "", text))
    for one in sweep.failures[:3]:
        lines.append(_labelled("failed", f"{one.count} × {one.error_class}: {one.detail}"))
    lines += [_labelled("note", Text(clean(sweep.note), style="yellow"))] if sweep.note else []
    return _laid_out(lines, room)
