"""Tables about one run: its checkpoints, and what it used of its nodes and GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dash import html

from hpcaccel.core.formatting import clock_time, duration, size
from hpcaccel.view.usage import GpuUsage, NodeUsage, Usage

__all__ = ["checkpoints_table", "plain_table", "profiles_table", "usage_tables"]


def plain_table(heads: tuple[str, ...], rows: list[Any]) -> html.Div:
    """A small table that scrolls sideways on a phone."""
    head = html.Thead(html.Tr([html.Th(name) for name in heads]))
    return html.Div(html.Table([head, html.Tbody(rows)], className="plain-table"), className="scroll-x")


def checkpoints_table(found: list[dict[str, Any]]) -> Any:
    """The checkpoints, newest first."""
    if not found:
        return html.P("No checkpoint yet. Save writes one now, without a stop.", className="hollow")
    return plain_table(
        ("Step", "Directory", "Saved", "Size", "Because", "Guarantee", ""),
        [_checkpoint(one) for one in reversed(found)],
    )


def _checkpoint(one: dict[str, Any]) -> html.Tr:
    step, when, count, good = one.get("step"), one.get("time"), one.get("bytes"), one.get("good")
    return html.Tr(
        [
            html.Td("" if step is None else f"{step:,}", className="number"),
            html.Td(str(one.get("path") or one.get("name") or "").rpartition("/")[2], className="mono"),
            html.Td(clock_time(when) if when else "", className="number muted"),
            html.Td(size(count) if count is not None else "", className="number"),
            html.Td(one.get("reason") or ""),
            html.Td(one.get("guarantee") or "", className="muted"),
            html.Td(one.get("problem") or "damaged" if good is False else "intact" if good else "", className="wide"),
        ]
    )


def profiles_table(found: list[dict[str, Any]], href: Callable[[str], str]) -> Any:
    """The traces of torch's profiler, newest first.

    Args:
        href: the address of a trace, from its name.
    """
    if not found:
        return html.P("No trace yet. Profile records the next 5 steps while the run trains.", className="hollow")
    rows = [
        html.Tr(
            [
                html.Td(str(one["attempt"]), className="number"),
                html.Td(str(one["rank"]), className="number"),
                html.Td(f"{one['first_step']:,} to {one['last_step']:,}", className="number"),
                html.Td(one["state"]),
                html.Td(clock_time(one["time"]), className="number muted"),
                html.Td(size(one["bytes"]) if one["name"] else "", className="number"),
                html.Td(_trace(one, href), className="wide"),
            ]
        )
        for one in reversed(found)
    ]
    note = html.P("ui.perfetto.dev and chrome://tracing open these files.", className="files")
    return [plain_table(("Attempt", "Rank", "Steps", "State", "Time", "Size", "Trace"), rows), note]


def _trace(one: dict[str, Any], href: Callable[[str], str]) -> Any:
    if not one["name"]:
        return one["detail"]
    return html.A("Download", href=href(one["name"]), download=one["name"].replace("/", "-"), className="link")


def usage_tables(usage: Usage | None) -> Any:
    """Nodes and GPUs, as far as there are samples."""
    if usage is None or not (usage.nodes or usage.gpus):
        return html.P("No samples yet. The job writes one every 15 seconds while it runs.", className="hollow")
    heads = ("Node", "CPUs in use", "Memory, peak", "Read", "Written")
    parts = [plain_table(heads, [_node(one) for one in usage.nodes])]
    if usage.gpus:
        of_gpus = ("Node", "GPU", "UUID", "Rank", "Mean use", "Memory, peak", "Idle", "Energy")
        parts.append(plain_table(of_gpus, [_gpu(one) for one in usage.gpus]))
    facts = []
    if usage.idle_gpu_hours:
        facts.append(f"{usage.idle_gpu_hours:.1f} GPU-hours idle")
    if usage.energy_kwh is not None:
        facts.append(f"{usage.energy_kwh:.2f} kWh of the GPUs")
    return [*parts, html.P(", ".join(facts), className="files")]


def _node(one: NodeUsage) -> html.Tr:
    share = "" if one.cpu_share is None else f"{100 * one.cpu_share:.0f} %" + (f" of {one.cpus}" if one.cpus else "")
    return html.Tr(
        [
            html.Td(one.node),
            html.Td(share, className="number"),
            html.Td(_of(one.memory_peak_bytes, one.memory_limit_bytes), className="number"),
            html.Td(_of(one.io_read_bytes), className="number"),
            html.Td(_of(one.io_write_bytes), className="number wide"),
        ]
    )


def _gpu(one: GpuUsage) -> html.Tr:
    return html.Tr(
        [
            html.Td(one.node),
            html.Td(one.name),
            html.Td(one.uuid, className="mono muted"),
            html.Td("" if one.rank is None else str(one.rank), className="number"),
            html.Td("" if one.mean_utilization is None else f"{one.mean_utilization:.0f} %", className="number"),
            html.Td(_of(one.memory_peak_bytes, one.memory_total_bytes), className="number"),
            html.Td(duration(one.idle_seconds) if one.idle_seconds else "", className="number"),
            html.Td("" if one.energy_kwh is None else f"{one.energy_kwh:.2f} kWh", className="number wide"),
        ]
    )


def _of(count: float | None, limit: float | None = None) -> str:
    return "" if count is None else size(count) + ("" if limit is None else f" of {size(limit)}")
