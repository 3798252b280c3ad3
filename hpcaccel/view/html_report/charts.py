"""Charts of the report as HTML with inline SVG.

The drawing area is an SVG that stretches with the page; axis labels are HTML beside it, so that text keeps its size on
a phone. Colours come from the page's style sheet (classes), which has a light and a dark palette.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from hpcaccel.core.formatting import number

__all__ = ["ChartLine", "Mark", "bars", "line_chart", "ticks"]

WIDTH, HEIGHT = 1000.0, 300.0
"""Size of the drawing area in its own units; on the page it stretches."""
FEW_POINTS = 60
"""A line with at most this many points shows each of them as a dot."""


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """One line of a chart."""

    points: Sequence[tuple[float, float]]
    name: str = ""
    style: str = "c1"
    """Class of the style sheet: ``c1`` … ``c8``, ``lost`` or ``dim``."""
    band: Sequence[tuple[float, float, float]] = field(default_factory=tuple)
    """Points (x, lowest, highest) of the area behind the line."""
    steps: bool = False
    """Whether the value changes at its point and stays, as a best value so far does."""
    thick: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line at ``x``, with a tooltip."""

    x: float
    text: str
    style: str = "mark"


@dataclass(frozen=True)
class _Scale:
    """Maps the values from ``low`` to ``high`` to 0 … 1."""

    low: float
    high: float

    def __call__(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most ``most`` round values from ``low`` to ``high``."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    every = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first = math.ceil(low / every - 1e-9)
    return [round(place * every, 12) for place in range(first, math.floor(high / every + 1e-9) + 1)]


def line_chart(
    lines: Sequence[ChartLine],
    *,
    x_title: str,
    y_title: str,
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    reach: Sequence[float] = (),
) -> Markup:
    """A chart of ``lines``; empty if no line has a finite point.

    Args:
        marks: vertical lines behind them.
        from_zero: whether the y axis begins at 0.
        reach: values of x that the axis includes.
    """
    kept = [(line, [(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)]) for line in lines]
    kept = [(line, points) for line, points in kept if points]
    if not kept:
        return Markup("")
    xs = _range([x for _, points in kept for x, _ in points] + list(reach), margin=0.0)
    ys = _range([y for _, points in kept for _, y in points], margin=0.06, floor=0.0 if from_zero else None)
    inside = [mark for mark in marks if xs.low <= mark.x <= xs.high]
    drawn = [_grid(ys), *(_mark(mark, xs) for mark in inside), *(_drawn(line, points, xs, ys) for line, points in kept)]
    area = Markup(
        '<svg viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" aria-label="{label}">{drawn}</svg>'
    ).format(w=int(WIDTH), h=int(HEIGHT), label=f"{y_title} over {x_title}", drawn=Markup("").join(drawn))
    y_labels = Markup("").join(
        Markup('<span style="top:{at}%">{text}</span>').format(at=_at(1 - ys(value)), text=number(value))
        for value in ticks(ys.low, ys.high, 5)
    )
    x_labels = Markup("").join(
        Markup('<span style="left:{at}%">{text}</span>').format(at=_at(xs(value)), text=f"{value:,.12g}")
        for value in ticks(xs.low, xs.high, 5)
    )
    return Markup(
        '<div class="chart"><div class="ytitle">{y}</div><div class="area"><div class="y">{ys}</div>{area}'
        '<div class="x">{xs}</div></div><div class="xtitle">{x}</div>{legend}</div>'
    ).format(y=y_title, x=x_title, ys=y_labels, xs=x_labels, area=area, legend=_legend([line for line, _ in kept]))


def bars(rows: Sequence[tuple[str, float, str]], *, style: str = "c1") -> Markup:
    """Horizontal bars, each with a name, a share from 0 to 1 of the full width, and a text after it."""
    cells = Markup("").join(
        Markup('<span class="name">{name}</span><span class="track"><i class="{style}" style="width:{w}%"></i></span>'
               '<span class="value">{text}</span>')
        .format(name=name, style=style, w=_at(max(0.0, min(1.0, share))), text=text)
        for name, share, text in rows
    )  # fmt: skip
    return Markup('<div class="bars">{cells}</div>').format(cells=cells)


def _at(share: float) -> str:
    return f"{100 * share:.3f}".rstrip("0").rstrip(".")


def _range(values: Sequence[float], *, margin: float, floor: float | None = None) -> _Scale:
    low, high = min(values), max(values)
    if floor is not None:
        low = min(low, floor)
    if high == low:
        pad = abs(low) * 0.5 or 1.0
        return _Scale(low - (0 if margin == 0.0 or floor is not None else pad), high + pad)
    pad = (high - low) * margin
    return _Scale(low if floor is not None else low - pad, high + pad)


def _grid(ys: _Scale) -> Markup:
    paths = "".join(f"M0 {_y(ys(value))}H{int(WIDTH)}" for value in ticks(ys.low, ys.high, 5))
    return Markup('<path class="grid" d="{d}"/>').format(d=paths)


def _mark(mark: Mark, xs: _Scale) -> Markup:
    return Markup('<path class="{style}" d="M{x} 0V{h}"><title>{text}</title></path>').format(
        style=mark.style, x=_x(xs(mark.x)), h=int(HEIGHT), text=mark.text
    )


def _drawn(line: ChartLine, points: list[tuple[float, float]], xs: _Scale, ys: _Scale) -> Markup:
    parts = []
    band = [(x, low, high) for x, low, high in line.band if math.isfinite(low) and math.isfinite(high)]
    if len(band) > 1:
        over = [f"{_x(xs(x))} {_clipped(ys(high))}" for x, _, high in band]
        under = [f"{_x(xs(x))} {_clipped(ys(low))}" for x, low, _ in reversed(band)]
        parts.append(Markup('<path class="band {s}" d="M{d}Z"/>').format(s=line.style, d="L".join([*over, *under])))
    places = [f"{_x(xs(x))} {_y(ys(y))}" for x, y in points]
    path = "M" + "L".join(places)
    if line.steps:
        path = f"M{places[0]}" + "".join(f"H{place.replace(' ', 'V')}" for place in places[1:])
    title = Markup("<title>{}</title>").format(line.name) if line.name else Markup("")
    style = f"{line.style} thick" if line.thick else line.style
    parts.append(Markup('<path class="line {s}" d="{d}">{t}</path>').format(s=style, d=path, t=title))
    if len(points) <= FEW_POINTS:  # a dot is a line of no length with round ends: it stays round when stretched
        dots = "".join(f"M{place}h0" for place in places)
        parts.append(Markup('<path class="dots {s}" d="{d}">{t}</path>').format(s=line.style, d=dots, t=title))
    return Markup("").join(parts)


def _x(share: float) -> str:
    return f"{WIDTH * share:.1f}".rstrip("0").rstrip(".")


def _y(share: float) -> str:
    return f"{HEIGHT * (1 - share):.1f}".rstrip("0").rstrip(".")


def _clipped(share: float) -> str:
    return _y(max(0.0, min(1.0, share)))


def _legend(lines: Sequence[ChartLine]) -> Markup:
    named: dict[tuple[str, str], None] = dict.fromkeys((line.name, line.style) for line in lines if line.name)
    if len(named) < 2:
        return Markup("")
    items = (Markup('<span><i class="{}"></i>{}</span>').format(style, escape(name)) for name, style in named)
    return Markup('<div class="legend">{}</div>').format(Markup("").join(items))
