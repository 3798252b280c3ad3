"""The ranks of a run on their nodes, and its use of CPUs, memory and GPUs, as sections of its report."""

from __future__ import annotations

from collections.abc import Iterator

from hpcaccel.core.formatting import gpu_hours, number, percent, precise_duration, size
from hpcaccel.view.html_report.page_parts import PageSection, RankCell, Table
from hpcaccel.view.run_overview import Overview

__all__ = ["rank_section", "usage_sections"]

MOST_RANKS = 2048


def rank_section(one: Overview) -> PageSection | None:
    """A strip of nodes and ranks: slow, silent and blamed ranks, and ranks with an idle GPU."""
    nodes: dict[str, list[RankCell]] = {}
    for rank in one.ranks[:MOST_RANKS]:
        about = [f"rank {rank.rank}: {rank.state}"]
        about += [f"step {rank.step}"] if rank.step is not None else []
        about += [f"{precise_duration(rank.step_seconds)} a step"] if rank.step_seconds is not None else []
        about += [rank.gpu] if rank.gpu else []
        about += ["its GPU is idle"] if rank.idle_gpu else []
        style = "idle" if rank.idle_gpu and rank.state in ("ok", "ended") else rank.state
        nodes.setdefault(rank.node or "unknown node", []).append(RankCell(style, str(rank.rank), ", ".join(about)))
    if not nodes:
        return None
    odd = [rank for rank in one.ranks if rank.state not in ("ok", "ended") or rank.idle_gpu]
    lines = [
        f"Rank {rank.rank} on {rank.node or 'an unknown node'}: "
        + ", ".join(
            [
                *([rank.state] if rank.state not in ("ok", "ended") else []),
                *(["its GPU is idle"] if rank.idle_gpu else []),
            ]
        )
        for rank in odd[:12]
    ]
    left_out = len(one.ranks) - MOST_RANKS
    note = f"The first {MOST_RANKS} of {len(one.ranks)} ranks." if left_out > 0 else ""
    return PageSection(title="Ranks", nodes=list(nodes.items()), lines=lines, note=note)


def usage_sections(one: Overview) -> Iterator[PageSection]:
    """Tables of nodes and of GPUs."""
    use = one.usage
    if use is None:
        return
    rows = []
    for node in use.nodes:
        memory = "" if node.memory_peak_bytes is None else size(node.memory_peak_bytes)
        limit = "" if not node.memory_limit_bytes else size(node.memory_limit_bytes)
        share = "" if node.cpu_share is None else percent(node.cpu_share)
        rows.append([node.node, share, "" if node.cpus is None else number(node.cpus), memory, limit])
    if rows:
        yield PageSection(
            title="CPUs and memory", wide=not use.gpus,
            table=Table(columns=["node", ">CPU use", ">CPUs", ">memory at most", ">limit"], rows=rows),
        )  # fmt: skip
    rows = []
    for gpu in use.gpus:
        idle = "" if not gpu.idle_seconds else precise_duration(gpu.idle_seconds)
        since = "" if gpu.idle_since_step is None else f"since step {gpu.idle_since_step}"
        memory = "" if gpu.memory_peak_bytes is None else size(gpu.memory_peak_bytes)
        memory += f" of {size(gpu.memory_total_bytes)}" if memory and gpu.memory_total_bytes else ""
        rows.append(
            [
                gpu.node,
                gpu.name,
                gpu.uuid,
                "" if gpu.rank is None else str(gpu.rank),
                "" if gpu.mean_utilization is None else f"{gpu.mean_utilization:.0f} %",
                memory,
                " ".join(word for word in (idle, since) if word),
                "" if gpu.energy_kwh is None else f"{number(gpu.energy_kwh)} kWh",
            ]
        )
    if rows:
        idle_hours = f"{gpu_hours(use.idle_gpu_hours)} GPU-hours idle." if use.idle_gpu_hours else ""
        columns = ["node", "GPU", "UUID", ">rank", ">use", ">memory at most", "idle", ">energy"]
        yield PageSection(title="GPUs", note=idle_hours, table=Table(columns=columns, rows=rows))
