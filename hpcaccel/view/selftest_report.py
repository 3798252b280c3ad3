"""Prints the verdict of a self-test: a table of the nodes, the problems with advice, or JSON."""

from __future__ import annotations

import statistics
from typing import Any, TextIO

from hpcaccel.core.formatting import clean, shortened
from hpcaccel.view.selftest_results import SelftestResults
from hpcaccel.view.selftest_verdict import NodeVerdict, SelftestVerdict
from hpcaccel.view.text_tables import Cell, Column, Styled, console_for, print_table

__all__ = ["print_verdict", "verdict_json"]

COLUMNS = (
    Column(title="NODE"),
    Column(title="RANKS", leaves=3),
    Column(title="VERDICT"),
    Column(title="LATENCY", right=True, leaves=2),
    Column(title="BANDWIDTH", right=True, leaves=2),
    Column(title="CLOCK", right=True, leaves=1),
    Column(title="PROBLEMS", wraps=20),
)
STYLES = {"ok": "green", "warning": "yellow", "bad": "bold red"}
MOST_CONSEQUENCES = 8


def print_verdict(verdict: SelftestVerdict, results: SelftestResults, *, stream: TextIO | None = None) -> None:
    """Print the table, then each problem with what to do about it, then one line with the verdict."""
    console = console_for(stream)
    print_table(COLUMNS, [_row(node) for node in verdict.nodes], console=console)
    for text in _measurements(results):
        console.print(text, markup=False)
    for node in verdict.nodes:
        for problem in node.problems:
            label = f"{problem.severity}: {node.name}: "
            console.print()
            console.print(clean(label + problem.message), style=STYLES[problem.severity], markup=False)
            if problem.advice:
                console.print(f"  to do: {problem.advice}", markup=False)
    if verdict.consequences:
        console.print("\nconsequences:", markup=False)
        for line in verdict.consequences[:MOST_CONSEQUENCES]:
            console.print(f"  {clean(line)}", markup=False)
    console.print()
    console.print(_conclusion(verdict), style=STYLES[verdict.verdict], markup=False)


def _row(node: NodeVerdict) -> list[Cell]:
    kinds = list(dict.fromkeys(problem.kind.replace("_", " ") for problem in node.problems))
    return [
        clean(node.name),
        _ranges(node.ranks),
        Styled(node.verdict, STYLES[node.verdict]),
        "-" if node.latency_us is None else f"{node.latency_us:g} µs",
        "-" if node.mb_per_s is None else f"{node.mb_per_s:g} MB/s",
        "-" if node.clock_ms is None else f"{node.clock_ms:+.1f} ms",
        ", ".join(kinds) or "-",
    ]


def _ranges(ranks: list[int]) -> str:
    """``0–3`` for consecutive ranks, else the first few."""
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    return shortened(ranks, 4) or "-"


def _measurements(results: SelftestResults) -> list[str]:
    """Measurements over all ranks."""
    lines = []
    reduces = [found for one in results.processes if (found := one.data("collectives", "all_reduce"))]
    if reduces:
        slowest = max(reduces, key=lambda found: float(found["seconds"]))
        lines.append(
            f"all-reduce of {slowest['bytes'] / 1e6:.1f} MB over {results.world_size} ranks: "
            f"{slowest['seconds'] * 1e3:.2f} ms, {slowest['mb_per_s']:g} MB/s"
        )
    missing = sorted({name for one in results.processes for name in one.data("collectives", "unsupported", {})})
    if missing:
        lines.append(f"not supported by the backend: {', '.join(missing)}")
    skipped: dict[str, list[str]] = {}
    for one in results.processes:
        for name, check in one.checks.items():
            if check.state == "skipped" and name not in skipped.setdefault(check.message, []):
                skipped[check.message].append(name)
    lines += [f"left out: {', '.join(names)} ({clean(why)})" for why, names in skipped.items()]
    return lines


def _conclusion(verdict: SelftestVerdict) -> str:
    count = f"{len(verdict.nodes)} node{'' if len(verdict.nodes) == 1 else 's'}"
    if verdict.verdict == "ok":
        return f"{count}: ok"
    named = [node.name for node in verdict.nodes if node.verdict == verdict.verdict]
    if not named:
        return "bad: no rank left a result"
    return f"{verdict.verdict}: {clean(shortened(named, 16))} ({len(named)} of {count})"


def verdict_json(verdict: SelftestVerdict, results: SelftestResults) -> dict[str, Any]:
    """The verdict and all measurements as JSON values."""
    return {
        "version": 1,
        "verdict": verdict.verdict,
        "nodes": {
            node.name: {
                "verdict": node.verdict,
                "ranks": node.ranks,
                "latency_us": node.latency_us,
                "mb_per_s": node.mb_per_s,
                "clock_ms": node.clock_ms,
                "problems": [
                    {
                        "severity": problem.severity,
                        "kind": problem.kind,
                        "check": problem.check,
                        "rank": problem.rank,
                        "message": problem.message,
                        "advice": problem.advice,
                    }
                    for problem in node.problems
                ],
            }
            for node in verdict.nodes
        },
        "consequences": list(verdict.consequences),
        "links": [dict(link) for link in verdict.links],
        "checks": _checks(results),
        "ranks": [
            {"rank": one.rank, "node": one.node, "data": {name: check.data for name, check in one.checks.items()}}
            for one in results.processes
        ],
    }


def _checks(results: SelftestResults) -> dict[str, dict[str, Any]]:
    """For each check, how many ranks ended it in which state, and the median of its durations."""
    found: dict[str, dict[str, Any]] = {}
    for one in results.processes:
        for name, check in one.checks.items():
            about = found.setdefault(name, {"states": {}, "seconds": []})
            about["states"][check.state] = about["states"].get(check.state, 0) + 1
            about["seconds"].append(check.seconds)
    return {name: {**about, "seconds": round(statistics.median(about["seconds"]), 3)} for name, about in found.items()}
