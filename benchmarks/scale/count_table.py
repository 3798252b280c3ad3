"""The table of counted and modelled requests, messages, bytes and operations."""

from __future__ import annotations

from scale.cost_term import COUNT_FACTOR
from scale.protocol_counts import LARGEST, PROTOCOLS

__all__ = ["differences", "show_counts"]


def differences(counts: dict[str, dict[int, float]], factor: float = 1.0) -> list[str]:
    """Messages about counts that differ from their models by more than ``factor``, in either direction."""
    return [
        f"{name}, {size} processes: counted {value:g}, model {PROTOCOLS[name].model(size):g}"
        for name, by_size in counts.items()
        for size, value in by_size.items()
        if not 1 / factor <= value / PROTOCOLS[name].model(size) <= factor
    ]


def show_counts(counts: dict[str, dict[int, float]]) -> bool:
    """Print each count, counted / model, and the model's value at ``LARGEST`` ranks. Returns whether all counts agree
    with their models within ``COUNT_FACTOR``."""
    sizes = sorted({size for by_size in counts.values() for size in by_size})
    heads = "".join(f"{size:>9,}" for size in sizes)
    print(
        f"\n{'counted with processes':42}{'grows with':>11}{'critical':>9}{heads}{'counted / model':>17}{LARGEST:>12,}"
    )
    for name, protocol in PROTOCOLS.items():
        if name in counts:
            row = "".join(f"{counts[name][size]:>9,.0f}" if size in counts[name] else " " * 9 for size in sizes)
            critical = "yes" if protocol.critical else "no"
            ratios = sorted(value / protocol.model(size) for size, value in counts[name].items())
            shown = " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1])))
            print(f"{name:42}{protocol.grows:>11}{critical:>9}{row}{shown:>17}{protocol.at(LARGEST):>12,.0f}")
    wrong = differences(counts, COUNT_FACTOR)
    print("".join(f"{'WRONG' if line in wrong else 'differs'}  {line}\n" for line in differences(counts)), end="")
    return not wrong
