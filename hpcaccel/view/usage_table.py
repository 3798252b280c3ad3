"""Use of resources as text: the facts of ``status`` and the tables of ``report``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from hpcaccel.core.formatting import clean, counted, gpu_hours, percent, precise_duration, shortened, size
from hpcaccel.view.hints import gpu_label, in_gb
from hpcaccel.view.text_tables import Cell, Column, Styled, print_table
from hpcaccel.view.usage import GpuUsage, NodeUsage, Usage

__all__ = ["print_usage", "usage_facts"]

SHOWN = 4
"""At most this many idle GPUs are named one by one."""


def usage_facts(use: Usage | None, advice: Sequence[str]) -> Iterator[tuple[str, Cell]]:
    """Rows for ``status``: GPUs, idle GPUs, energy, CPUs and memory, advice. Empty without samples and advice."""
    if use is not None:
        yield from _facts(use)
    for number, line in enumerate(advice):
        yield "next time" if not number else "", clean(line)


def _facts(use: Usage) -> Iterator[tuple[str, Cell]]:
    if use.gpus:
        yield "GPUs", _gpus(use.gpus)
    if idle := use.idle_gpus:
        names = shortened([clean(gpu_label(gpu)) for gpu in idle], SHOWN)
        yield "idle GPUs", Styled(names, "yellow")
    if use.idle_gpu_hours:
        yield "idle GPU time", f"{gpu_hours(use.idle_gpu_hours)} GPU-hours"
    if use.energy_kwh is not None:
        yield "GPU energy", _energy(use.energy_kwh)
    if use.nodes:
        yield "CPUs, memory", _nodes(use.nodes)


def _gpus(gpus: Sequence[GpuUsage]) -> str:
    parts = [counted(len(gpus), "GPU")]
    if known := [gpu.mean_utilization for gpu in gpus if gpu.mean_utilization is not None]:
        parts.append(f"{sum(known) / len(known):.0f} % busy on average")
    if full := [gpu for gpu in gpus if gpu.memory_peak_bytes is not None and gpu.memory_total_bytes]:
        fullest = max(full, key=lambda gpu: gpu.memory_peak_bytes or 0)
        parts.append(f"memory up to {_of(fullest.memory_peak_bytes, fullest.memory_total_bytes)}")
    return ", ".join(parts)


def _nodes(nodes: Sequence[NodeUsage]) -> str:
    parts = []
    if shares := [(one.cpu_share, one.cpus) for one in nodes if one.cpu_share is not None and one.cpus]:
        share, cpus = max(shares)
        parts.append(f"{share * cpus:.1f} of {cpus} CPUs in use")
    if known := [one for one in nodes if one.memory_peak_bytes is not None]:
        fullest = max(known, key=lambda one: one.memory_peak_bytes or 0)
        parts.append(f"memory up to {_of(fullest.memory_peak_bytes, fullest.memory_limit_bytes)}")
    where = "" if len(nodes) == 1 else " (the busiest node)"
    return (", ".join(parts) or "unknown") + where


def _of(used: int | None, whole: int | None) -> str:
    if used is None:
        return "unknown"
    return f"{in_gb(used)} GB" if not whole else f"{in_gb(used)} of {in_gb(whole)} GB"


def _energy(kwh: float) -> str:
    return f"{kwh:.2f} kWh" if kwh < 10 else f"{kwh:,.0f} kWh"


def print_usage(use: Usage | None, advice: Sequence[str], *, console: Console) -> None:
    """Print a table of the nodes, one of the GPUs, energy and idle time, and the advice."""
    if use is not None:
        _print_use(use, console)
    if advice:
        console.print()
        console.print(Text("for the next run:"))
    for line in advice:
        console.print(Text(f"  {clean(line)}"))


def _print_use(use: Usage, console: Console) -> None:
    console.print()
    _print_nodes(use.nodes, console)
    if use.gpus:
        console.print()
        _print_gpus(use.gpus, console)
    if use.idle_gpu_hours or use.energy_kwh is not None:
        console.print()
    if use.idle_gpu_hours:
        console.print(Text(f"idle GPUs: {gpu_hours(use.idle_gpu_hours)} GPU-hours"))
    if use.energy_kwh is not None:
        console.print(Text(f"energy of the GPUs: {_energy(use.energy_kwh)}"))


def _print_nodes(nodes: Sequence[NodeUsage], console: Console) -> None:
    columns = (
        Column(title="NODE"),
        Column(title="CPUS", right=True),
        Column(title="IN USE", right=True),
        Column(title="MEMORY", right=True),
        Column(title="OF", right=True),
        Column(title="READ", right=True, leaves=1),
        Column(title="WRITTEN", right=True, leaves=0),
    )
    rows = [
        (
            clean(one.node),
            "-" if one.cpus is None else str(one.cpus),
            percent(one.cpu_share),
            _memory(one.memory_peak_bytes),
            _memory(one.memory_limit_bytes),
            _size(one.io_read_bytes),
            _size(one.io_write_bytes),
        )
        for one in nodes
    ]
    print_table(columns, rows, console=console)


def _print_gpus(gpus: Sequence[GpuUsage], console: Console) -> None:
    columns = (
        Column(title="GPU"),
        Column(title="NODE"),
        Column(title="RANK", right=True, leaves=2),
        Column(title="TYPE", leaves=0),
        Column(title="BUSY", right=True),
        Column(title="IDLE", right=True),
        Column(title="MEMORY", right=True),
        Column(title="OF", right=True, leaves=3),
        Column(title="ENERGY", right=True, leaves=1),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            clean(one.uuid[:12]),
            clean(one.node),
            "-" if one.rank is None else str(one.rank),
            clean(one.name),
            "-" if one.mean_utilization is None else f"{one.mean_utilization:.0f} %",
            Styled(precise_duration(one.idle_seconds), "yellow") if one.idle_seconds else "-",
            _memory(one.memory_peak_bytes),
            _memory(one.memory_total_bytes),
            "-" if one.energy_kwh is None else _energy(one.energy_kwh),
        )
        for one in gpus
    ]
    print_table(columns, rows, console=console)


def _memory(count: int | None) -> str:
    return "-" if count is None else f"{in_gb(count)} GB"


def _size(count: int | None) -> str:
    return "-" if count is None else size(count)
