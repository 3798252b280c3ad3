"""Formatting of numbers, durations, sizes, lists of names and untrusted text for terminals and messages."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

__all__ = [
    "ago",
    "clean",
    "clock_time",
    "counted",
    "did_you_mean",
    "duration",
    "gpu_hours",
    "number",
    "percent",
    "precise_duration",
    "rate",
    "shortened",
    "size",
    "step_of",
]


def clean(text: str) -> str:
    """``text`` on one line with control characters escaped, so that untrusted text cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(names: Sequence[object], most: int) -> str:
    """The first ``most`` names, as ``a, b`` or, if there are more, as ``a, b and 3 more``."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + rest


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """The end of a message about an unknown word, such as ``. Did you mean 'gpu'?``; "" if no known word is similar.

    Args:
        cutoff: the least similarity, from 0 to 1; see ``difflib.get_close_matches``.
    """
    import difflib  # in this function: most programs need no hint

    match = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f". Did you mean {match[0]!r}?" if match else ""


def duration(seconds: float) -> str:
    """A duration as ``45s``, ``3m 05s``, ``2h 07m`` or ``4d 03h``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def precise_duration(seconds: float) -> str:
    """Like :func:`duration`, with decimals below a minute: ``2.35s``, ``45.1s``, ``3m 05s``."""
    return duration(seconds) if seconds >= 60 else f"{seconds:.2f}s" if seconds < 10 else f"{seconds:.1f}s"


def gpu_hours(hours: float) -> str:
    """Hours as ``0.25`` or ``12.3``: with two significant digits below 10, with one decimal from 10 on."""
    return f"{hours:.1f}" if hours >= 10 else f"{hours:.2g}"


def percent(share: float | None) -> str:
    """A fraction as ``97.3 %``; ``-`` if unknown."""
    return "-" if share is None else f"{100 * share:.1f} %"


def ago(then: float, now: float | None = None) -> str:
    return f"{duration((time.time() if now is None else now) - then)} ago"


def clock_time(epoch_seconds: float) -> str:
    """The local time, as ``2026-11-20 15:30``."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(epoch_seconds))


def number(value: float) -> str:
    """A number with four significant digits (``2.413``, ``0.0003``, ``1.2e-07``), as a whole number from 10,000 on."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def size(count: float) -> str:
    """A number of bytes as ``812 B`` or ``1.2 GB``, in powers of 1,000."""
    for limit, divisor, unit in ((1e3, 1, "B"), (1e6, 1e3, "kB"), (1e9, 1e6, "MB"), (1e12, 1e9, "GB")):
        if abs(count) < limit:
            return f"{count / divisor:.0f} B" if divisor == 1 else f"{count / divisor:.1f} {unit}"
    return f"{count / 1e12:.1f} TB"


def rate(per_second: float) -> str:
    """A rate as ``950``, ``12.3k`` or ``4.1M``."""
    for limit, divisor, unit in ((1e4, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (math.inf, 1e9, "G")):
        if abs(per_second) < limit:
            return f"{per_second / divisor:.0f}" if divisor == 1 else f"{per_second / divisor:.1f}{unit}"
    return str(per_second)


def step_of(step: int | None, total: int | None) -> str:
    """A step as ``120/400``; ``120`` if the total is unknown, ``-`` if the step is unknown."""
    if step is None:
        return "-"
    return f"{step}/{total}" if total is not None else str(step)
