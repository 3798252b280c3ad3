"""An animated SVG of a recorded terminal session: CSS keyframes, no script.

Every state of every line is an element that is visible for its time. Without animation (a printer, a reader who wants
no motion) the last state of each line is visible: the end of the session.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from hpcaccel_pictures.recording import TYPED, Recording
from hpcaccel_pictures.screen_lines import Line, Run, screen_lines

__all__ = ["shown_times", "terminal_picture"]

CELL = 8.4
LINE = 19
MARGIN = 16
BAR = 34
"""Height of the bar with the title, and of the one with what is typed elsewhere."""

TARGET_SECONDS = 22.0
LONGEST_PAUSE_SECONDS = 2.0
FRAME_SECONDS = 0.05
TYPING_SECONDS = 0.15
"""A shorter pause is one between two keys: it is shown as it was."""
END_SECONDS = 5.0
"""How long the end is shown before the session begins again."""

COLOURS = {
    "default": "#d6dde5", "black": "#484f58", "red": "#ff7b72", "green": "#56d364", "brown": "#e3b341",
    "blue": "#79c0ff", "magenta": "#d2a8ff", "cyan": "#76e3ea", "white": "#f0f6fc", "brightblack": "#8b949e",
}  # fmt: skip
BACKGROUND = "#0d1117"
STYLE = """\
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre;fill:{default}}}
.s{{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#8b949e}}
.b{{font-weight:700}}.h{{visibility:hidden}}.t{{animation:{seconds}s step-end infinite}}
@media (prefers-reduced-motion:reduce){{.t{{animation:none!important}}}}
"""


def terminal_picture(recording: Recording) -> str:
    """The SVG."""
    times = shown_times(recording)
    seconds = times[-1] + END_SECONDS
    timeline = _Timeline(seconds)
    lines = list(screen_lines(recording, times))
    width = round(recording.columns * CELL + 2 * MARGIN)
    height = 2 * BAR + (1 + max(line.row for line in lines)) * LINE + MARGIN
    body = [text for line in lines for text in _drawn(line, timeline)]
    body += _elsewhere(recording, times, timeline, height)
    real = recording.events[-1][0]
    note = f"recorded in {real:.0f} s, pauses shortened"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(recording.title)}">',
        f"<title>{escape(recording.title)}</title>",
        f"<style>{STYLE.format(seconds=f'{seconds:.2f}', **COLOURS)}{timeline.keyframes()}</style>",
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" fill="{BACKGROUND}" stroke="#30363d"/>',
        f'<path d="M0 {BAR}H{width}" stroke="#21262d"/>',
        *(f'<circle cx="{18 + 18 * n}" cy="17" r="5.5" fill="{colour}"/>'
          for n, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))),
        f'<text class="s" x="{width / 2:g}" y="22" text-anchor="middle">{escape(recording.title)}</text>',
        f'<text class="s" x="{width - MARGIN}" y="22" text-anchor="end">{note}</text>',
        *body,
        "</svg>",
    ]) + "\n"  # fmt: skip


def shown_times(recording: Recording) -> list[float]:
    """When each event is shown: pauses are cut, then everything but the typing runs faster, as far as needed to fit."""
    real = [time for time, _, _ in recording.events]
    pauses = [min(after - before, LONGEST_PAUSE_SECONDS) for before, after in zip([0.0, *real], real, strict=False)]
    typed = sum(pause for pause in pauses if pause < TYPING_SECONDS)
    rest = sum(pauses) - typed
    factor = min(1.0, max(0.0, TARGET_SECONDS - typed) / rest) if rest else 1.0
    found, now = [], 0.0
    for pause in pauses:
        now += pause if pause < TYPING_SECONDS else pause * factor
        found.append(round(round(now / FRAME_SECONDS) * FRAME_SECONDS, 2))
    return found


class _Timeline:
    """Keyframes for the elements that are visible for a part of the session."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._names: dict[tuple[float, float | None], str] = {}

    def attributes(self, start: float, end: float | None) -> str:
        """Attributes of an element that is visible from ``start`` to ``end`` (None: the end of the session)."""
        if start == 0 and end is None:
            return ""
        name = self._names.setdefault((start, end), f"k{len(self._names)}")
        return f' class="t{"" if end is None else " h"}" style="animation-name:{name}"'

    def keyframes(self) -> str:
        """The rules of all elements so far."""
        return "\n".join(f"@keyframes {name}{{{self._steps(*times)}}}" for times, name in self._names.items())

    def _steps(self, start: float, end: float | None) -> str:
        steps = {0.0: start == 0, self._percent(start): True}
        if end is not None:
            steps[self._percent(end)] = False
        return "".join(
            f"{percent:g}%{{visibility:{'visible' if shown else 'hidden'}}}" for percent, shown in steps.items()
        )

    def _percent(self, time: float) -> float:
        return round(100 * time / self._seconds, 2)


def _drawn(line: Line, timeline: _Timeline) -> Iterator[str]:
    top = BAR + MARGIN / 2 + line.row * LINE
    yield f"<g{timeline.attributes(line.start, line.end)}>"
    for run in line.runs:
        if run.reverse:
            width = f"{len(run.text) * CELL:g}"
            yield f'<rect x="{_x(run)}" y="{top + 1:g}" width="{width}" height="{LINE - 2}" fill="{_colour(run)}"/>'
        if run.text.strip():
            yield _text(run, top + 14)
    yield "</g>"


def _text(run: Run, y: float) -> str:
    """A run without its spaces at both ends. ``textLength`` keeps the columns with every font."""
    text = run.text.strip()
    x = MARGIN + (run.column + len(run.text) - len(run.text.lstrip())) * CELL
    bold = ' class="b"' if run.bold else ""
    colour = BACKGROUND if run.reverse else _colour(run)
    fill = "" if colour == COLOURS["default"] else f' style="fill:{colour}"'
    return f'<text{bold}{fill} x="{x:g}" y="{y:g}" textLength="{len(text) * CELL:g}">{escape(text, quote=False)}</text>'


def _x(run: Run) -> str:
    return f"{MARGIN + run.column * CELL:g}"


def _colour(run: Run) -> str:
    if run.colour in COLOURS:
        return COLOURS[run.colour]
    return COLOURS.get(run.colour.removeprefix("bright"), f"#{run.colour}")


def _elsewhere(recording: Recording, times: list[float], timeline: _Timeline, height: int) -> Iterator[str]:
    """The lower bar, with the command that somebody else has typed last."""
    marks = [(time, text) for time, (_, kind, text) in zip(times, recording.events, strict=True) if kind == TYPED]
    yield f'<path d="M0 {height - BAR}H{round(recording.columns * CELL + 2 * MARGIN)}" stroke="#21262d"/>'
    for number, (time, text) in enumerate(marks):
        end = marks[number + 1][0] if number + 1 < len(marks) else None
        yield f"<g{timeline.attributes(time, end)}>"
        yield f'<text class="s" x="{MARGIN}" y="{height - 12}">another user</text>'
        yield f'<text style="fill:#e3b341" x="{MARGIN + 90}" y="{height - 12}">$ {escape(text, quote=False)}</text>'
        yield "</g>"
