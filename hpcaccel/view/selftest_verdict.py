"""The verdict on each node of a self-test: ok, warning or bad, with the problems found and what to do about them.

A failed collective fails on all ranks, and so does the rendezvous. Errors that name no rank are therefore consequences
as long as another problem explains them; if none does, they count for every node that reports them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hpcaccel.view.selftest_blame import slow_links
from hpcaccel.view.selftest_problems import SelftestProblem, Severity, blamed_nodes, problems_of, unexplained
from hpcaccel.view.selftest_results import SelftestResults

__all__ = ["NodeVerdict", "SelftestVerdict", "judge"]

CLOCK_MS: Mapping[Severity, float] = {"bad": 2000.0, "warning": 100.0}
SLOW_NETWORK_MB_PER_S = 100.0
"""Between nodes. Slower than gigabit Ethernet."""


@dataclass
class NodeVerdict:
    """The verdict on one node, and its measurements."""

    name: str
    ranks: list[int] = field(default_factory=list)
    verdict: Literal["ok", "warning", "bad"] = "ok"
    problems: list[SelftestProblem] = field(default_factory=list)
    latency_us: float | None = None
    mb_per_s: float | None = None
    clock_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class SelftestVerdict:
    """The verdict on all nodes."""

    nodes: Sequence[NodeVerdict]
    problems: Sequence[SelftestProblem]
    consequences: Sequence[str]
    """Errors that another problem explains."""
    links: Sequence[Mapping[str, Any]]

    @property
    def verdict(self) -> Literal["ok", "warning", "bad"]:
        found = {node.verdict for node in self.nodes}
        return "bad" if "bad" in found or not self.nodes else "warning" if "warning" in found else "ok"


def judge(results: SelftestResults) -> SelftestVerdict:
    """Compute the verdict on each node."""
    links = _links(results)
    clocks = _clocks(results)
    problems = [*problems_of(results), *_slow(links), *_skewed(clocks)]
    consequences = list(unexplained(results))
    if not any(problem.severity == "bad" for problem in problems):
        problems += consequences
        consequences = []
    problems = list(dict.fromkeys(problems))
    nodes: dict[str, NodeVerdict] = {}
    for rank in range(results.world_size):
        nodes.setdefault(results.node_of(rank), NodeVerdict(results.node_of(rank))).ranks.append(rank)
    for name in [*(one.node for one in results.processes), *(problem.node for problem in problems)]:
        nodes.setdefault(name, NodeVerdict(name))
    for problem in sorted(problems, key=lambda problem: problem.severity):
        node = nodes[problem.node]
        node.problems.append(problem)
        node.verdict = "bad" if "bad" in (problem.severity, node.verdict) else "warning"
    for node in nodes.values():
        _measure(node, links, clocks)
    explained = list(dict.fromkeys(f"{problem.node}: {problem.message}" for problem in consequences))
    return SelftestVerdict(nodes=list(nodes.values()), problems=problems, consequences=explained, links=links)


def _measure(node: NodeVerdict, links: Sequence[Mapping[str, Any]], clocks: Mapping[str, float]) -> None:
    own = [link for link in links if node.name in link["nodes"]]
    if own:
        node.latency_us = round(statistics.median(link["latency_us"] for link in own), 1)
        node.mb_per_s = round(statistics.median(link["mb_per_s"] for link in own), 1)
    node.clock_ms = clocks.get(node.name)


def _links(results: SelftestResults) -> list[dict[str, Any]]:
    """The measured links. The bandwidth of a link is that of its slower direction."""
    return [
        {
            "ranks": [one.rank, link["other"]],
            "nodes": [one.node, results.node_of(link["other"])],
            "latency_us": link["latency_us"],
            "mb_per_s": min(link["mb_per_s_there"], link["mb_per_s_back"]),
            "mb_per_s_there": link["mb_per_s_there"],
            "mb_per_s_back": link["mb_per_s_back"],
        }
        for one in results.processes
        for link in one.data("pairs", "links", ())
    ]


def _clocks(results: SelftestResults) -> dict[str, float]:
    """The offset of each node's clock from the median of all nodes, in ms."""
    for one in results.processes:
        if one.rank == 0 and (clocks := one.data("clocks", "clocks")):
            offsets = {one.node: 0.0} | {results.node_of(int(rank)): at["offset_ms"] for rank, at in clocks.items()}
            middle = statistics.median(offsets.values())
            return {node: round(offset - middle, 3) for node, offset in offsets.items()}
    return {}


def _skewed(clocks: Mapping[str, float]) -> Iterator[SelftestProblem]:
    for node, offset in clocks.items():
        severity = next((level for level, limit in CLOCK_MS.items() if abs(offset) > limit), None)
        if severity is not None:
            side = "ahead of" if offset > 0 else "behind"
            message = f"the clock is {abs(offset):.0f} ms {side} the median of all nodes"
            yield SelftestProblem(node=node, kind="clock", message=message, check="clocks", severity=severity)


def _slow(links: Sequence[Mapping[str, Any]]) -> Iterator[SelftestProblem]:
    between = [link for link in links if link["nodes"][0] != link["nodes"][1]]
    by_nodes = {(link["nodes"][0], link["nodes"][1]): link for link in between}
    slow = slow_links(
        {nodes: link["mb_per_s"] for nodes, link in by_nodes.items()},
        {nodes: link["latency_us"] for nodes, link in by_nodes.items()},
    )

    def text(nodes: tuple[str, str]) -> str:
        link = by_nodes[nodes]
        return f"{nodes[0]} – {nodes[1]}: {link['mb_per_s']:g} MB/s, {link['latency_us']:g} µs"

    yield from blamed_nodes(slow, "slow_link", "pairs", text)
    for nodes, link in by_nodes.items() if not slow else ():
        if link["mb_per_s"] < SLOW_NETWORK_MB_PER_S:
            message = f"the link is slower than gigabit Ethernet: {text(nodes)}"
            for node in nodes:
                yield SelftestProblem(
                    node=node, kind="slow_network", message=message, check="pairs", severity="warning"
                )
