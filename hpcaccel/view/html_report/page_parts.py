"""Parts of a report's page as plain data, which the template renders, and masking of secrets in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

from markupsafe import Markup

from hpcaccel.core.formatting import precise_duration
from hpcaccel.core.log import Mask
from hpcaccel.core.run_dir import RunDir
from hpcaccel.launch.environment_report import masked

__all__ = [
    "BarBlock",
    "Fact",
    "Page",
    "PageSection",
    "RankCell",
    "Strip",
    "Table",
    "mask_of",
    "paired",
    "sealed",
    "spec_of",
    "strip_of",
]

T = TypeVar("T")
EMPTY = Markup("")

_SECRET_WORDS = ("token", "key", "secret", "password", "passwd", "credential")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; columns whose title begins with ``>`` are right-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None
    """Index of the row that is set in bold."""


@dataclass(frozen=True)
class Fact:
    """A number at the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class BarBlock:
    """A part of a bar: its style, its place and size in percent of the bar, and its tooltip."""

    style: str
    left: float
    width: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Strip:
    """A bar of coloured parts with a legend (style, name, amount)."""

    blocks: Sequence[BarBlock]
    legend: Sequence[tuple[str, str, str]]
    first: str = ""
    last: str = ""
    """Texts below the two ends of the bar."""


@dataclass(frozen=True)
class RankCell:
    """A rank in the strip of nodes and ranks."""

    style: str
    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """A titled part of the page. The parts that it has are shown in the order of these fields."""

    title: str
    note: str = ""
    wide: bool = True
    alarm: bool = False
    """Whether the section reports a failure."""
    strip: Strip | None = None
    chart: Markup = EMPTY
    nodes: Sequence[tuple[str, Sequence[RankCell]]] = ()
    table: Table | None = None
    lines: Sequence[str] = ()
    text: str = ""
    folded: bool | None = None
    """Whether the reader has to open the section; None: it cannot be closed."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report."""

    title: str
    subtitle: str
    state: str = ""
    detail: str = ""
    progress: float | None = None
    """Share of the steps that are done, from 0 to 1."""
    facts: Sequence[Fact] = ()
    sections: Sequence[PageSection] = field(default_factory=tuple)
    made: str = ""


def paired(sections: Iterable[PageSection | None]) -> list[PageSection]:
    """The sections that exist. A narrow one without a narrow neighbour becomes wide."""
    found = [section for section in sections if section is not None]
    place = 0
    while place < len(found):
        if found[place].wide:
            place += 1
        elif place + 1 < len(found) and not found[place + 1].wide:
            place += 2
        else:
            found[place] = replace(found[place], wide=True)
            place += 1
    return found


def strip_of(parts: Iterable[tuple[str, str, float, str]], *, first: str = "", last: str = "") -> Strip | None:
    """A bar of ``parts``, each with its style, name, seconds, and tooltip; None if they take no time."""
    known = [part for part in parts if part[2] > 0]
    total = sum(seconds for _, _, seconds, _ in known)
    if total <= 0:
        return None
    blocks: list[BarBlock] = []
    sums: dict[tuple[str, str], float] = {}
    at = 0.0
    for style, name, seconds, text in known:
        width = 100 * seconds / total
        blocks.append(BarBlock(style=style, left=round(at, 3), width=round(width, 3), text=text))
        at += width
        sums[style, name] = sums.get((style, name), 0.0) + seconds
    legend = [(style, name, precise_duration(seconds)) for (style, name), seconds in sums.items()]
    return Strip(blocks=blocks, legend=legend, first=first, last=last)


def spec_of(document: Mapping[str, Any] | None) -> dict[str, Any]:
    """The spec in the document of ``spec.json``, flat: ``slurm.nodes`` → value. Unset fields are left out."""
    found: dict[str, Any] = {}

    def take(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                take(f"{prefix}.{key}" if prefix else str(key), item)
        elif value is not None and value != []:
            found[prefix] = value

    take("", (document or {}).get("spec", {}))
    return found


def mask_of(run: RunDir, spec: Mapping[str, Any]) -> Callable[[str], str]:
    """Replaces secrets in a text: the values of ``environment.secrets``, of variables of the spec with a name such as
    ``WANDB_API_KEY``, and what looks like a token or a password."""
    own = [
        str(value)
        for name, value in spec.items()
        if name.startswith("environment.env.") and any(word in name.lower() for word in _SECRET_WORDS)
    ]
    declared, of_spec = Mask.of(run), Mask(own)
    return lambda text: masked(of_spec(declared(text)))


def sealed(value: T, mask: Callable[[str], str]) -> T:
    """``value`` with each of its texts passed through ``mask``. Markup, which charts make of numbers, stays."""
    found: Any = value
    if isinstance(value, Markup):
        return value
    if isinstance(value, str):
        found = mask(value) if len(value) > 3 and not value.isdecimal() else value
    elif is_dataclass(value) and not isinstance(value, type):
        found = replace(value, **{one.name: sealed(getattr(value, one.name), mask) for one in fields(value)})
    elif isinstance(value, list | tuple):
        found = type(value)(sealed(item, mask) for item in value)
    return found  # type: ignore[no-any-return]
