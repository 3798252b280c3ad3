"""The plots of ``docs/scale.md``, as SVG files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from scale.group_protocols import OPERATION_SECONDS, Protocols
from scale.lost_time import MTTF_HOURS, SCENARIOS, ettr

__all__ = ["draw"]

DOCS = Path(__file__).parents[2] / "docs"
RANKS = [2**power for power in range(4, 15)]
MINUTES = (1, 2, 5, 10, 20, 30, 60)


def draw(protocols: Protocols, folder: Path = DOCS) -> list[Path]:
    """Write the plots into ``folder``. Returns their paths."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "hpcaccel", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    return [_protocols(protocols, folder / "scale-protocols.svg"), _lost_time(folder / "scale-ettr.svg")]


def _protocols(protocols: Protocols, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    curves: dict[str, Callable[[int], float]] = {
        "check-in": lambda ranks: protocols.rendezvous(ranks).seconds,
        "a group, full mesh": lambda ranks: protocols.group_seconds(ranks, lazy=False),
        "a group, on demand": lambda ranks: protocols.group_seconds(ranks, lazy=True),
        "a ring of all ranks": protocols.ring_seconds,
        "stop agreement": protocols.agreement_seconds,
        "a call of the script": protocols.call_seconds,
    }
    for label, curve in curves.items():
        left.loglog(RANKS, [curve(ranks) for ranks in RANKS], marker=".", label=label)
    _finish(left, "start and steps", "seconds")
    for seconds in OPERATION_SECONDS:
        values = [protocols.commit_seconds(ranks, operation_seconds=seconds) for ranks in RANKS]
        right.loglog(RANKS, values, marker=".", label=f"{1e3 * seconds:g} ms an operation")
    _finish(right, "commit after the last file is written", "seconds")
    return _save(figure, path)


def _lost_time(path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(MTTF_HOURS), figsize=(9, 3.6), layout="constrained", sharey=True)
    for axis, (name, hours) in zip(axes, MTTF_HOURS.items(), strict=True):
        for label, recovery in SCENARIOS.items():
            shares = [ettr(recovery, interval_seconds=60 * minutes, mttf_hours=hours) for minutes in MINUTES]
            axis.semilogx(MINUTES, shares, marker=".", label=label)
        axis.set(title=name, xlabel="minutes between checkpoints")
        axis.set_xticks(MINUTES, [str(minutes) for minutes in MINUTES], minor=False)
        axis.minorticks_off()
    axes[0].set_ylabel("ETTR at 16,384 GPUs")
    axes[-1].legend(fontsize=7)
    return _save(figure, path)


def _finish(axis: Any, title: str, unit: str) -> None:
    axis.set(title=title, xlabel="ranks", ylabel=unit)
    axis.set_xticks(RANKS[::2], [f"{ranks:,}" for ranks in RANKS[::2]], minor=False)
    axis.minorticks_off()
    axis.legend(fontsize=7)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return path
