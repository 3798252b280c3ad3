"""The strip of nodes and ranks: one cell per rank, with slow, silent and blamed ranks and idle GPUs."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from dash import html

from hpcaccel.core.formatting import counted
from hpcaccel.view.run_overview import Overview

__all__ = ["rank_strip"]

WORDS = {"ok": "in step", "slow": "slow", "silent": "silent", "blamed": "at fault", "ended": "ended"}


def rank_strip(run: Overview) -> html.Section | None:
    """The ranks of the newest attempt, one row per node; None without ranks."""
    if not run.ranks:
        return None
    nodes: dict[str, list[Any]] = defaultdict(list)
    for rank in run.ranks:
        nodes[rank.node or "unknown node"].append(rank)
    counts = Counter(rank.state for rank in run.ranks)
    idle = sum(rank.idle_gpu for rank in run.ranks)
    legend = [
        html.Li(
            [html.Span(className=f"swatch r-{state}"), WORDS[state], html.Span(str(counts[state]), className="muted")]
        )
        for state in WORDS
        if counts[state]
    ]
    if idle:
        legend.append(
            html.Li([html.Span(className="swatch r-idle"), "GPU idle", html.Span(str(idle), className="muted")])
        )
    return html.Section(
        className="card",
        children=[
            html.Header(
                [
                    html.H2("Ranks"),
                    html.Span(f"{counted(len(run.ranks), 'rank')} on {counted(len(nodes), 'node')}", className="muted"),
                    html.Ul(legend, className="legend"),
                ]
            ),
            html.Div(
                className="strip",
                children=[
                    html.Div(
                        [
                            html.Span(node, className="strip-node"),
                            html.Div([_cell(rank) for rank in ranks], className="cells"),
                        ],
                        className="strip-row",
                    )
                    for node, ranks in nodes.items()
                ],
            ),
            _trouble(run),
        ],
    )


def _cell(rank: Any) -> html.Span:
    look = f"cell r-{rank.state}" + (" is-idle" if rank.idle_gpu else "")
    return html.Span(str(rank.rank), className=look, title=_words(rank))


def _words(rank: Any) -> str:
    parts = [f"rank {rank.rank} on {rank.node or 'an unknown node'}: {WORDS.get(rank.state, rank.state)}"]
    if rank.step is not None:
        parts.append(f"step {rank.step}")
    if rank.step_seconds is not None:
        parts.append(f"{rank.step_seconds:.3g} s a step")
    if rank.ratio is not None:
        parts.append(f"{rank.ratio:.2g} times the median")
    if rank.phase:
        parts.append(rank.phase)
    if rank.waits_in:
        parts.append(f"waits in {rank.waits_in}")
    if rank.site:
        parts.append(rank.site)
    if rank.gpu:
        parts.append(f"{rank.gpu}, idle" if rank.idle_gpu else rank.gpu)
    return "\n".join(parts)


def _trouble(run: Overview) -> html.Ul | None:
    """The ranks that need attention, in words."""
    bad = [rank for rank in run.ranks if rank.state in ("slow", "silent", "blamed") or rank.idle_gpu]
    return (
        html.Ul([html.Li(_words(rank).replace("\n", ", ")) for rank in bad[:8]], className="trouble") if bad else None
    )
