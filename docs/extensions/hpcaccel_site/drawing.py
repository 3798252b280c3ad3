"""A canvas for the drawings of the site: boxes, lines and text as SVG.

A drawing has a light background of its own, because a page shows it as an image, which does not know whether the page
is light or dark.
"""

from __future__ import annotations

import math
from html import escape

__all__ = ["BLUE", "GREEN", "GREY", "INK", "ORANGE", "RED", "SOFT", "Drawing", "width_of"]

PAPER, INK, SOFT = "#fbfcfd", "#1f2933", "#52606d"
BLUE, GREEN, ORANGE, RED, GREY = "#2b6cb0", "#2f7d4f", "#b7581b", "#b3261e", "#7b8794"
_PALE = {BLUE: "#dbe9f6", GREEN: "#dcefe2", ORANGE: "#fbe6d6", RED: "#f8dcd9", GREY: "#e8ecf0"}
_CHARACTER, _LINE = 0.6, 1.35
"""Width of a character and distance of two lines, in font sizes. The width is that of wide sans-serif fonts."""

Point = tuple[float, float]


def width_of(text: str, size: float) -> float:
    """Estimated width of the longest line, in pixels; most fonts need less."""
    return max(map(len, text.split("\n"))) * _CHARACTER * size


class Drawing:
    """A drawing of ``width`` times ``height`` pixels; ``title`` is for screen readers."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._width, self._height = width, height
        self._parts = [
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        ]

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        *,
        color: str = GREY,
        dashed: bool = False,
        filled: bool = True,
        size: float = 12,
        mono: bool = False,
    ) -> None:
        """A rectangle with a text in its middle, which must fit."""
        assert width_of(text, size) <= width, f"{text!r} does not fit into {width} pixels"
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{_PALE[color] if filled else "none"}" stroke="{color}"{_dash(dashed)}/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2, text, size=size, anchor="middle", mono=mono)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 11,
        color: str = INK,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Lines of text, whose middle is at the height ``y``."""
        lines = text.split("\n")
        top = y + 0.35 * size - _LINE * size * (len(lines) - 1) / 2
        family = ' font-family="monospace"' if mono else ""
        weight = ' font-weight="bold"' if bold else ""
        for number, line in enumerate(lines):
            self._parts.append(
                f'<text x="{x:g}" y="{top + _LINE * size * number:g}" font-size="{size:g}" fill="{color}" '
                f'text-anchor="{anchor}"{family}{weight}>{escape(line)}</text>'
            )

    def line(
        self, *points: Point, color: str = SOFT, dashed: bool = False, arrow: bool = False, both: bool = False
    ) -> None:
        """A line through ``points``, with an arrowhead at its end, or at both ends."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"{_dash(dashed)}/>'
        )
        if arrow or both:
            self._head(points[-2], points[-1], color)
        if both:
            self._head(points[1], points[0], color)

    def _head(self, before: Point, tip: Point, color: str) -> None:
        angle = math.atan2(tip[1] - before[1], tip[0] - before[0])
        corners = [
            tip,
            *((tip[0] - 9 * math.cos(angle + turn), tip[1] - 9 * math.sin(angle + turn)) for turn in (0.4, -0.4)),
        ]
        self.polygon(*corners, color=color)

    def polygon(self, *corners: Point, color: str) -> None:
        path = " ".join(f"{x:.4g},{y:.4g}" for x, y in corners)
        self._parts.append(f'<polygon points="{path}" fill="{color}"/>')

    def signal(self, x: float, y: float) -> None:
        """The mark of a signal that arrives: a triangle that points down, to ``y``."""
        self.polygon((x - 6, y - 11), (x + 6, y - 11), (x, y), color=RED)

    def flag(self, x: float, y: float, text: str) -> None:
        """A circle with one character."""
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="{PAPER}" stroke="{INK}" stroke-width="1.5"/>')
        self.text(x, y, text, anchor="middle", bold=True)

    def svg(self) -> str:
        """The content of the file."""
        size = f'viewBox="0 0 {self._width} {self._height}" width="{self._width}" height="{self._height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif">'
        return "\n".join([head, *self._parts, "</svg>", ""])


def _dash(dashed: bool) -> str:
    return ' stroke-dasharray="5 4"' if dashed else ""
