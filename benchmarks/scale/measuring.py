"""All measurements on this machine, as cost terms, and their file."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from scale import commit_costs, faulty_run, plan_costs, record_costs, store_costs, tree_costs
from scale.cost_term import COUNT_FACTOR, CostTerm
from scale.group_protocols import MEASURED_WIDTH

__all__ = ["CONSTANTS", "load", "measure", "save"]

CONSTANTS = Path(__file__).with_name("constants.json")
"""The terms and constants of one run of ``measure`` on the machine that it names."""
RANKS = (2, 4, 8, 16, 32, 64)
BLOCKS = (128, 192, 256)
"""Numbers of ranks that form several blocks."""
WORLDS = (2, 8, 64, 1024, 16384)
"""Numbers of ranks for what one rank does alone."""
TIME_FACTOR = 4.0
"""Allowed ratio of predicted and measured seconds. Two shared cores do the work of all ranks."""
TURNS = 3


def measure(progress: Callable[[str], None], only: str = "") -> tuple[dict[str, CostTerm], dict[str, Any]]:
    """Measure every term.

    Args:
        only: measure the terms and constants whose names contain this text, and take the others from ``CONSTANTS``.

    Returns:
        Terms by name, and single constants: the machine, ``store_request_seconds``, and the run of ``faulty_run``.
    """
    terms: dict[str, CostTerm] = {}
    recorded, constants = load() if only else ({}, {})

    def add(
        name: str, unit: str, law: str, of: Callable[[int], float], sizes: Iterable[int] = RANKS, *,
        critical: bool = True, fitted: int = 2,
    ) -> None:  # fmt: skip
        if only not in name:
            terms[name] = recorded[name]
            return
        progress(name)
        factor = TIME_FACTOR if unit == "s" else COUNT_FACTOR
        measured = {size: float(of(size)) for size in sizes}
        terms[name] = CostTerm(name, unit, law, measured, factor, critical, fitted)

    met = cache(lambda ranks: _fastest(partial(store_costs.check_in, ranks)))
    add("check-in: requests of all ranks", "requests", "P", lambda p: met(p)["requests"])
    add("check-in: requests of rank 0", "requests", "constant", lambda p: met(p)["first"])
    add("check-in", "s", "P", lambda p: met(p)["seconds"], fitted=len(RANKS))
    small = (2, 4, 8, 16)
    for kind, law, sizes in (("full mesh", "P", small), ("lazy", "constant", small[1:])):
        made = cache(partial(store_costs.group_creation, lazy=kind == "lazy"))
        for what in ("requests", "descriptors"):
            add(f"group, {kind}: {what} of a rank", what, law, partial(_of_a_rank, made, what), sizes)
    rings, trees = (2, 4, 8, 16, 32), (8, 16, 32)
    add("one ring all-reduce", "s", "P", lambda p: tree_costs.reduction_seconds(p, p), rings, fitted=3)
    tree = partial(tree_costs.reduction_seconds, width=MEASURED_WIDTH)
    add("tree all-reduce", "s", "log P", tree, trees, fitted=len(trees))
    counted = cache(commit_costs.operations)
    add("commit: operations of a writer", "operations", "constant", lambda p: counted(p)["writer"])
    add("commit: operations of rank 0", "operations", "P", lambda p: counted(p)["first"])
    add("commit: operations of rank 0, in blocks", "operations", "P", lambda p: counted(p)["first"], BLOCKS)
    saves = cache(lambda ranks: _fastest(partial(_commit, ranks)))
    add("commit: entries of a folder", "entries", "P", lambda p: saves(p)["entries"], critical=False)
    add("commit: bytes of the index", "bytes", "P", lambda p: saves(p)["index_bytes"], critical=False)
    add("commit: bytes of the manifest", "bytes", "P", lambda p: saves(p)["manifest_bytes"], critical=False)
    add("commit: bytes of the manifest, in blocks", "bytes", "P", lambda p: saves(p)["manifest_bytes"], BLOCKS)
    add(
        "load: bytes of manifest and index at a rank, in blocks",
        "bytes",
        "constant",
        lambda p: saves(p)["load_bytes"],
        BLOCKS,
    )
    add("commit: gather", "s", "P", lambda p: saves(p)["gather_seconds"], critical=False, fitted=3)
    add("commit: publish", "s", "P", lambda p: saves(p)["publish_seconds"], critical=False, fitted=3)
    add(
        "commit: gather and publish, in blocks",
        "s",
        "P",
        lambda p: saves(p)["gather_seconds"] + saves(p)["publish_seconds"],
        BLOCKS,
        critical=False,
    )
    plans = cache(plan_costs.plan_costs)
    add("plan: bytes of a message", "bytes", "constant", lambda p: plans(p)["message_bytes"], WORLDS)
    add("plan: rank 0", "s", "log P", lambda p: plans(p)["seconds"], WORLDS, fitted=3)
    indexes = cache(plan_costs.index_costs)
    add("plan: bytes of the index", "bytes", "P", lambda p: indexes(p)["index_bytes"], critical=False)
    add("plan: parsing the index", "s", "P", lambda p: indexes(p)["parse_seconds"], fitted=3)
    add("snapshot: bytes of the index at a rank", "bytes", "constant", plan_costs.snapshot_index_bytes, WORLDS)
    add("attempt: entries of a folder", "entries", "P", record_costs.attempt_entries, critical=False)
    add("attempt: reading all heartbeats", "s", "P", record_costs.heartbeat_seconds, (8, 16, 32, 64), critical=False)
    many = (500, 1000, 2000, 5000)
    add("run index: reading", "s", "P", record_costs.index_seconds, many, critical=False)
    journals = cache(record_costs.journal_costs)
    add("journal: bytes", "bytes", "P", lambda n: journals(n)[0], many, critical=False)
    add("journal: reading", "s", "P", lambda n: journals(n)[1], many, critical=False)
    add("journal: one trial of one process", "s", "constant", record_costs.lock_seconds, (20, 40, 100), critical=False)
    if only in "a request at the store":
        progress("a request at the store")
        constants |= {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
            "store_request_seconds": min(store_costs.request_seconds() for _ in range(TURNS)),
            "cores": os.cpu_count() or 1,
        }
    if only in "a run under faults":
        progress("a run under faults")
        constants["faulty_run"] = faulty_run.measure()
    return terms, constants


def _of_a_rank(made: Callable[[int], dict[str, Any]], what: str, ranks: int) -> float:
    return float(made(ranks)[what]) / ranks


def _commit(ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return commit_costs.commit(ranks, folder=Path(folder))


def _fastest(measurement: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The smallest value of each figure in ``TURNS`` turns."""
    found = [measurement() for _ in range(TURNS)]
    return {key: min(one[key] for one in found) for key in found[0]}


def save(terms: dict[str, CostTerm], constants: dict[str, Any], path: Path = CONSTANTS) -> None:
    """Write the terms and constants as JSON."""
    content = {**constants, "terms": {name: term.to_json() for name, term in terms.items()}}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path = CONSTANTS) -> tuple[dict[str, CostTerm], dict[str, Any]]:
    """Read what ``save`` has written."""
    content = json.loads(path.read_text(encoding="utf-8"))
    terms = {name: CostTerm.from_json(fields) for name, fields in content.pop("terms").items()}
    return terms, content
