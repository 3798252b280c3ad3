"""What hpcaccel's protocols cost at 16 to 16,384 ranks, with 100,000 trials and with 1,000,000 runs.

Counts what 2 to 64 processes ask, send and write, beside a model of each count. Measures constants on this machine,
checks each against measurements at other sizes, and simulates with them. Exits with 1 if a count or a prediction is off
by more than its factor. ``--recorded`` uses the recorded counts and constants instead.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import Any

from scale import measuring, protocol_counts
from scale.cost_term import CostTerm
from scale.count_table import show_counts
from scale.group_protocols import OPERATION_SECONDS, TENSORS, Protocols
from scale.lost_time import MTTF_HOURS, PARAMETERS, SCENARIOS, ettr
from scale.many_trials import sweep
from scale.protocol_counts import PROTOCOLS

SIZES = (16, 64, 256, 1024, 4096, 16_384)
RUNS = 1_000_000
RUN_FACTOR = 1.1
"""Allowed ratio of the simulated and the measured share of useful time."""
INTERVALS = (60, 120, 300, 600, 1200, 1800, 3600)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help="use the recorded numbers, measure nothing")
    parser.add_argument("--only", metavar="TEXT", default="", help="measure what has TEXT in its name; else recorded")
    parser.add_argument("--record", action="store_true", help="write counts and constants into the repository")
    parser.add_argument("--counts", action="store_true", help="only count, with processes; minutes")
    parser.add_argument("--plots", action="store_true", help="write docs/scale-*.svg (matplotlib)")
    options = parser.parse_args()
    progress = partial(print, "measuring:", file=sys.stderr, flush=True)
    counts = protocol_counts.load() if options.recorded or options.only else protocol_counts.measure(progress)
    if options.record:
        protocol_counts.save(counts)
    if options.counts:
        return 0 if show_counts(counts) else 1
    if options.recorded:
        terms, constants = measuring.load()
    else:
        terms, constants = measuring.measure(progress, options.only)
    if options.record:
        measuring.save(terms, constants)
    print(f"constants of: {constants['machine']}")
    passed = show_terms(terms)
    passed = show_counts(counts) and passed
    protocols = Protocols.of(terms, constants)
    passed = show_simulated(protocols) and passed
    show_protocols(protocols)
    show_left_over(protocols)
    passed = show_faulty_run(constants["faulty_run"]) and passed
    show_lost_time()
    show_many(terms)
    if options.plots:
        from scale.scale_plots import draw

        draw(protocols)
    return 0 if passed else 1


def show_terms(terms: dict[str, CostTerm]) -> bool:
    """Print each term's law and its check. Returns whether all predictions agree with the measurements."""
    print(f"\n{'term':44}{'grows with':>12}{'critical':>10}   predicted / measured (size), allowed factor")
    for term in terms.values():
        ratios = ", ".join(f"{ratio:.2f} ({size})" for size, ratio in term.ratios().items())
        verdict = "" if term.holds else "  WRONG"
        critical = "yes" if term.critical else "no"
        print(f"{term.name:44}{term.law:>12}{critical:>10}   {ratios}, {term.factor:g}{verdict}")
    return all(term.holds for term in terms.values())


def show_simulated(protocols: Protocols) -> bool:
    """Print simulated / measured values. Returns whether they agree within the terms' factors."""
    passed = True
    for name, found in protocols.simulated().items():
        measured, factor = protocols.terms[name].measured, protocols.terms[name].factor
        ratios = {size: seconds / measured[size] for size, seconds in found.items()}
        holds = all(1 / factor <= ratio <= factor for ratio in ratios.values())
        shown = ", ".join(f"{ratio:.2f} ({size})" for size, ratio in ratios.items())
        print(f"{name}: simulated / measured (ranks): {shown}, {factor:g}{'' if holds else '  WRONG'}")
        passed = passed and holds
    return passed


def show_protocols(protocols: Protocols) -> None:
    """Print time and requests of rendezvous, groups, stop agreement and commit."""
    print(f"\n{'ranks':>8}{'check-in':>23}{'a group, full mesh':>27}{'a group, lazy':>25}{'stop agreement':>28}")
    for ranks in SIZES:
        met = protocols.rendezvous(ranks)
        groups = ""
        for lazy, width in ((False, 12), (True, 9)):
            requests, seconds = protocols.group_requests(ranks, lazy=lazy), protocols.group_seconds(ranks, lazy=lazy)
            groups += f"{requests:>{width},.0f} req {seconds:9.3f} s"
        one_ring = 1e3 * protocols.ring_seconds(ranks)
        tree = 1e3 * protocols.agreement_seconds(ranks)
        print(
            f"{ranks:>8,}{met.requests:>9,} req {met.seconds:7.3f} s{groups}"
            f"   ring {one_ring:7.1f}, used {tree:5.1f} ms"
        )
    print(f"\n{'ranks':>8}{'a call of the script: ring':>28}{'used':>12}{'gather of 8 bytes':>20}")
    for ranks in SIZES:
        ring, used = 1e3 * protocols.call_ring_seconds(ranks), 1e3 * protocols.call_seconds(ranks)
        gather = 1e3 * protocols.call_seconds(ranks, row_bytes=8)
        print(f"{ranks:>8,}{ring:>25.1f} ms{used:>9.1f} ms{gather:>17.1f} ms")
    print(f"\n{'ranks':>8}{'operations of rank 0':>22}{'commit after the last file':>32}{'index':>14}{'entries':>10}")
    for ranks in SIZES:
        fast, slow = (protocols.commit_seconds(ranks, operation_seconds=each) for each in OPERATION_SECONDS)
        index = protocols.terms["commit: bytes of the index"].predict(ranks) / 1e6
        entries = PROTOCOLS["commit: entries of the largest folder"].at(ranks)
        print(
            f"{ranks:>8,}{protocols.commit_operations(ranks):>22,.0f}{fast:>14.3f} to {slow:8.3f} s"
            f"{index:>14.1f} MB{entries:>8,.0f}"
        )
    print(f"\n{'ranks':>8}{'a new plan: bytes of a message':>34}{'time':>12}   ({TENSORS} tensors over all ranks)")
    for ranks in SIZES:
        message, seconds = protocols.plan(ranks)
        print(f"{ranks:>8,}{message / 1e3:>31,.0f} kB{seconds:>10.2f} s")
    shown = " and ".join(f"{1e3 * each:g} ms" for each in OPERATION_SECONDS)
    print(f"(an operation on the shared file system: {shown}, assumed; the index: 16 tensors over all ranks)")


def show_left_over(protocols: Protocols) -> None:
    """Print what still grows with the number of ranks."""
    print(f"\nstill growing with the number of ranks; index of {TENSORS} tensors split over all ranks")
    print(
        f"{'ranks':>8}{'requests at the store':>32}{'index':>12}"
        f"{'at a rank of a load':>23}{'manifest':>12}{'entries':>9}"
    )
    for ranks in SIZES:
        one = protocols.left_over(ranks)
        print(
            f"{ranks:>8,}{one.store_requests:>20,} {one.store_seconds:9.3f} s"
            f"{one.index_bytes / 1e6:>9,.0f} MB{one.load_bytes / 1e6:>9.1f} MB {one.parse_seconds:8.2f} s"
            f"{one.manifest_bytes / 1e3:>9.1f} kB"
            f"{one.entries:>9,.0f}"
        )


def show_faulty_run(run: dict[str, float]) -> bool:
    """Print the share of useful time of a real run under faults, and the simulated one. Returns whether they agree."""
    ratio = run["simulated"] / run["measured"]
    holds = 1 / RUN_FACTOR <= ratio <= RUN_FACTOR
    print(
        f"\na real run of {run['seconds']:.0f} s with {run['faults']:.0f} killed ranks, {run['restart_seconds']:.2f} s "
        f"from a kill to the next start: share of useful time: measured {run['measured']:.3f}, simulated "
        f"{run['simulated']:.3f}; simulated / measured {ratio:.2f}, {RUN_FACTOR:g}{'' if holds else '  WRONG'}"
    )
    return holds


def show_lost_time() -> None:
    """Print ETTR against the interval of checkpoints."""
    print("\nparameters of the following table:")
    for name, parameter in PARAMETERS.items():
        print(f"  {name:28}{parameter.value:8g}  {parameter.origin}: {parameter.note}")
    for name, hours in MTTF_HOURS.items():
        print(f"\nETTR at 16,384 GPUs, {name} ({hours:.2f} h); checkpoint every")
        print(f"{'':40}" + "".join(f"{interval / 60:>7g} m" for interval in INTERVALS))
        for label, recovery in SCENARIOS.items():
            row = [ettr(recovery, interval_seconds=interval, mttf_hours=hours) for interval in INTERVALS]
            print(f"{label:40}" + "".join(f"{share:>9.3f}" for share in row))


def show_many(terms: dict[str, CostTerm]) -> None:
    """Print a sweep of 100,000 trials, and what a million runs cost."""
    found = sweep(terms, trials=100_000, workers=1000, trial_seconds=600.0)
    rows: dict[str, Any] = {
        "hours with trials of 10 minutes on average (assumed)": f"{found.hours:.1f}",
        "share of the time in which the journal is written": f"{found.journal_busy:.3f}",
        "mean wait of a worker for the journal, per trial": f"{1e3 * found.waiting_seconds:.1f} ms",
        "journal": f"{found.journal_bytes / 1e6:.0f} MB",
        "sweep status reads it in": f"{found.status_seconds:.1f} s",
        "the same in one worker, over the whole sweep": f"{found.reading_seconds:.1f} s of CPU time",
    }
    print("\n100,000 trials, 1,000 workers")
    for name, value in rows.items():
        print(f"  {name:56}{value}")
    seconds = terms["run index: reading"].predict(RUNS)
    looks = PROTOCOLS["runs: operations of a search by name"].at(RUNS)
    listing = PROTOCOLS["runs: operations of a listing"].at(RUNS)
    fast, slow = (listing * each for each in OPERATION_SECONDS)
    print(f"\n{RUNS:,} runs of one user")
    print(f"  a search by run ID or name: reads the index in {seconds:.1f} s, then {looks:.0f} operations on folders")
    print(f"  a list: {listing:,.0f} operations on folders, {fast:,.0f} to {slow:,.0f} s on a shared file system")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's groups of many threads may wait for each other at a normal exit
