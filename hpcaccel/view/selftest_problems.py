"""The problems of a self-test: what the ranks report about themselves, and what a comparison of all ranks shows.

Each finder yields problems with the node at fault. Errors that name no rank are left to ``unexplained``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcaccel.core.formatting import shortened
from hpcaccel.view.selftest_blame import bad_links, blamed_for_links
from hpcaccel.view.selftest_results import RankResults, SelftestResults

__all__ = ["ADVICE", "SelftestProblem", "blamed_nodes", "problems_of", "unexplained"]

Severity = Literal["bad", "warning"]
UNKNOWN = ("error", "timeout", "wrong_training", "different_ranks")
"""Kinds of faults that are consequences of others, unless they name a rank."""

ADVICE: Mapping[str, str] = {
    "never_started": "check in the rank's log and, in a job, in slurm.log whether the program started on this node",
    "ended_early": "look at the rank's log for the end of the process, and at `dmesg` on the node (out of memory?)",
    "missing": "check that the node can reach rank 0's address, and that all ranks were started",
    "unreachable": "check routes, firewall and name resolution between the node and rank 0's node; MASTER_ADDR selects "
    "another address",
    "no_connection": "check routes and firewall between the nodes; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME select "
    "another interface",
    "twice": "start each rank once, and do not set RANK to the same value for all of them",
    "world_size": "unset WORLD_SIZE and RANK, or set them to the same launch on all ranks",
    "environment": "start the ranks with hpcaccel, srun or torchrun only, and unset stale variables",
    "timeout": "look at what the rank did last; a file system or a driver may hang on its node",
    "hung": "look at what the rank did last; a file system or a driver may hang on its node",
    "error": "look at the logs of the ranks",
    "kernel": "use a node with Linux 5.5 or newer",
    "disk_full": "free space, or use another folder (TMPDIR, --runs-dir)",
    "disk": "check that the folder exists, is writable, and that its file system is mounted",
    "not_shared": "use --runs-dir with a folder that all nodes share",
    "address": "set MASTER_ADDR to an address of rank 0's node that all nodes can reach",
    "interface": "set the variable to an interface of the node (`ip link`), or unset it",
    "infiniband": "ask the site's administrators to look at the port (`ibstat`)",
    "gpu": "exclude the node (slurm.exclude), and report it to the site's administrators",
    "gpu_memory": "end the other processes, or exclude the node",
    "device": "exclude the node, and look at `nvidia-smi` there",
    "wrong_result": "exclude the node, and report it: its memory, its device or its network interface is faulty",
    "wrong_training": "exclude the node, and report it: its memory or its device is faulty",
    "different_ranks": "compare the versions of torch and of the drivers on the nodes",
    "checkpoint": "run the test again with another --runs-dir; look at the file system's servers",
    "slow_link": "compare the node's interface with the others' (`ethtool`, `ibstat`); NCCL_SOCKET_IFNAME and "
    "GLOO_SOCKET_IFNAME select another one",
    "slow_network": "check that the ranks use the fast network: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME select it",
    "clock": "check the time service on the node (`chronyc tracking`)",
    "differs": "use the same installation and the same kind of node for all ranks",
}


@dataclass(frozen=True, kw_only=True)
class SelftestProblem:
    """A problem of a node."""

    node: str
    kind: str
    message: str
    check: str
    severity: Severity = "bad"
    rank: int | None = None

    @property
    def advice(self) -> str:
        return ADVICE.get(self.kind, "")


# -- what the ranks report ---------------------------------------------------------------------------------------------


def _absent(results: SelftestResults) -> Iterator[SelftestProblem]:
    for rank in results.missing:
        message = f"rank {rank} of {results.world_size} left no result: it never started, or ended before the checks"
        yield SelftestProblem(
            node=results.node_of(rank), kind="never_started", message=message, check="environment", rank=rank
        )


def _ended_early(results: SelftestResults) -> Iterator[SelftestProblem]:
    """Ranks that did not come to their own end. If some were killed by a known signal, only those: srun may kill the
    others later."""
    known = any(one.end for one in results.processes)
    for one in results.processes:
        if known and not one.end:
            continue
        if one.is_over or "environment" not in one.checks or one.checks["environment"].state == "failed":
            continue
        check = one.open_check
        step = one.checks[check].last_step if check is not None else ""
        where = f"during the check {check!r}{f' ({step})' if step else ''}" if check is not None else "between checks"
        yield SelftestProblem(
            node=one.node, kind="ended_early", message=f"rank {one.rank} {one.end or 'ended or was killed'} {where}",
            check=check or "end", rank=one.rank,
        )  # fmt: skip


def _attributed(results: SelftestResults) -> Iterator[SelftestProblem]:
    """Faults that name ranks. A rank's faults of its own are those of the process that reports them."""
    for one, check, fault in _faults(results):
        for rank in fault["ranks"] or ([] if fault["kind"] in (*UNKNOWN, *_COMPARED) else [None]):
            node = one.node if rank in (None, one.rank) else results.node_of(rank)
            yield SelftestProblem(
                node=node, kind=fault["kind"], message=fault["message"], check=check, severity=fault["severity"],
                rank=one.rank if rank is None else rank,
            )  # fmt: skip


_COMPARED = ("wrong_result", "no_connection")
"""Kinds of faults whose node is found by a comparison of all ranks."""


def unexplained(results: SelftestResults) -> Iterator[SelftestProblem]:
    for one, check, fault in _faults(results):
        if not fault["ranks"] and fault["kind"] in UNKNOWN:
            yield SelftestProblem(
                node=one.node, kind=fault["kind"], message=fault["message"], check=check, rank=one.rank
            )


def _faults(results: SelftestResults) -> Iterator[tuple[RankResults, str, Mapping[str, Any]]]:
    for one in results.processes:
        for name, check in one.checks.items():
            for fault in check.faults:
                yield one, name, fault


def _hung(results: SelftestResults) -> Iterator[SelftestProblem]:
    """Of the ranks that exceeded the limit of a check, those that had got less far than others."""
    late: dict[str, list[RankResults]] = defaultdict(list)
    for one in results.processes:
        for name, check in one.checks.items():
            if check.state == "timeout" and any(not fault["ranks"] for fault in check.faults):
                late[name].append(one)
    for name, processes in late.items():
        furthest = max(one.checks[name].steps for one in results.processes if name in one.checks)
        behind = [one for one in processes if one.checks[name].steps < furthest]
        for one in behind if len(behind) < len(results.processes) else []:
            step = one.checks[name].last_step or "its beginning"
            message = f"rank {one.rank} hung in the check {name!r} at {step!r}, while other ranks had got further"
            yield SelftestProblem(node=one.node, kind="hung", message=message, check=name, rank=one.rank)


# -- comparisons of all ranks ------------------------------------------------------------------------------------------


def _unconnected(results: SelftestResults) -> Iterator[SelftestProblem]:
    unreachable: dict[str, set[str]] = defaultdict(set)
    messages: dict[frozenset[str], str] = {}
    for one in results.processes:
        for rank in one.data("connections", "unreachable", ()):
            unreachable[one.node].add(results.node_of(rank))
    for one, _, fault in _faults(results):
        for node in unreachable[one.node] if fault["kind"] == "no_connection" else ():
            if f" {node} " in fault["message"]:
                messages[frozenset((one.node, node))] = f"{one.node} {fault['message']}"
    bad = bad_links(unreachable)
    yield from blamed_nodes(bad, "no_connection", "connections", lambda link: messages.get(frozenset(link), ""))


def _wrong(results: SelftestResults) -> Iterator[SelftestProblem]:
    """Wrong results of the collectives: the rank from which they came, or the rank at which they arrived."""
    found: dict[tuple[str, str], str] = {}
    for one in results.processes:
        for sender, places in dict(one.data("collectives", "wrong", {})).items():
            found[f"from {sender}", f"at {one.rank}"] = f"rank {sender} → rank {one.rank}: {shortened(places, 3)}"
    ends, links = blamed_for_links(found)
    for end in [*ends, *(end for link in links for end in link)]:
        way, _, rank = end.partition(" ")
        shown = next(text for link, text in found.items() if end in link)
        verb = "sent" if way == "from" else "received"
        yield SelftestProblem(
            node=results.node_of(int(rank)), kind="wrong_result", check="collectives", rank=int(rank),
            message=f"rank {rank} {verb} wrong numbers in collectives ({shown})",
        )  # fmt: skip


def _corrupt(results: SelftestResults) -> Iterator[SelftestProblem]:
    """Messages of the pairs with wrong contents: the node with most such partners; with a single one, both nodes."""
    found: dict[tuple[str, str], str] = {}
    for one in results.processes:
        for other in one.data("pairs", "wrong", ()):
            first, second = sorted((one.node, results.node_of(other)))
            found[first, second] = f"{first} – {second}: wrong contents from rank {other} at rank {one.rank}"
    yield from blamed_nodes(set(found), "wrong_result", "pairs", found.__getitem__)


def blamed_nodes(
    bad: set[tuple[str, str]], kind: str, check: str, text: Callable[[tuple[str, str]], str]
) -> Iterator[SelftestProblem]:
    words = {"slow_link": "slow", "no_connection": "broken", "wrong_result": "corrupt"}[kind]
    blamed, left = blamed_for_links(bad)
    for node in blamed:
        own = sorted(link for link in bad if node in link)
        shown = "; ".join(text(link) for link in own[:3]) + (f" and {len(own) - 3} more" if len(own) > 3 else "")
        count = "1 link of this node is" if len(own) == 1 else f"{len(own)} links of this node are"
        message = f"{count} {words} ({shown})"
        yield SelftestProblem(node=node, kind=kind, message=message, check=check)
    who = "one of the two nodes is at fault" if kind == "wrong_result" else "either end may be at fault"
    for link in left:
        message = f"the link is {words}, and {who} ({text(link)})"
        for node in link:
            severity: Severity = "warning" if kind == "slow_link" else "bad"
            yield SelftestProblem(node=node, kind=kind, message=message, check=check, severity=severity)


def _twice(results: SelftestResults) -> Iterator[SelftestProblem]:
    """Processes with the same rank. If the rank's node is known, only those elsewhere."""
    by_rank: dict[int, list[RankResults]] = defaultdict(list)
    for one in results.processes:
        if one.rank is not None:
            by_rank[one.rank].append(one)
    for rank, processes in by_rank.items():
        elsewhere = [one for one in processes if one.node != results.node_of(rank)]
        for one in (elsewhere or processes) if len(processes) > 1 else ():
            where = ", ".join(sorted(f"{other.node} (process {other.pid})" for other in processes))
            message = f"{len(processes)} processes have rank {rank}: {where}"
            yield SelftestProblem(node=one.node, kind="twice", message=message, check="environment", rank=rank)


def _different_sizes(results: SelftestResults) -> Iterator[SelftestProblem]:
    sizes = {one.rank: size for one in results.processes if (size := one.data("environment", "world_size")) is not None}
    counts = Counter(sizes.values())
    usual = [size for size, count in counts.items() if count == max(counts.values())]
    usual = [results.expected] if results.expected in counts else usual
    shown = ", ".join(f"rank {rank}: {size}" for rank, size in sorted(sizes.items(), key=str)[:8])
    for one in results.processes if len(counts) > 1 else ():
        if len(usual) > 1 or sizes.get(one.rank) not in (None, usual[0]):
            message = f"the ranks have different world sizes ({shown})"
            yield SelftestProblem(node=one.node, kind="world_size", message=message, check="environment", rank=one.rank)


_SAME = (
    ("kernel", "torch", "torch"), ("gpus", "count", "number of GPUs"), ("gpus", "names", "GPUs"),
    ("gpus", "driver", "GPU driver"), ("network", "nccl", "NCCL"), ("network", "active", "number of InfiniBand ports"),
)  # fmt: skip
"""Measurements that should be the same on all nodes: the check, the key, its name in messages."""


def _different_nodes(results: SelftestResults) -> Iterator[SelftestProblem]:
    for check, key, called in _SAME:
        values = {one.node: str(value) for one in results.processes if (value := one.data(check, key)) is not None}
        counts = Counter(values.values())
        if len(counts) < 2:
            continue
        usual = counts.most_common(1)[0][0]
        for node, value in values.items():
            if value != usual:
                message = f"{called}: {value} here, {usual} on {counts[usual]} other nodes"
                yield SelftestProblem(node=node, kind="differs", message=message, check=check, severity="warning")


def problems_of(results: SelftestResults) -> list[SelftestProblem]:
    """All problems that name a node, without measurements of links and clocks."""
    finders = (
        _absent,
        _ended_early,
        _attributed,
        _hung,
        _unconnected,
        _wrong,
        _corrupt,
        _twice,
        _different_sizes,
        _different_nodes,
    )
    found = [problem for find in finders for problem in find(results)]
    return list(_without_consequences(results, found))


_NEVER_JOINED = ("never_started", "world_size", "environment", "twice", "ended_early")


def _without_consequences(results: SelftestResults, found: list[SelftestProblem]) -> Iterator[SelftestProblem]:
    """Leave out that a rank is missing or cannot reach rank 0 if another problem explains it. If no rank reaches rank
    0, its node is at fault."""
    joined_not = {problem.rank for problem in found if problem.kind in _NEVER_JOINED}
    others = set(range(1, results.world_size))
    cut_off = {problem.rank for problem in found if problem.kind in ("missing", "unreachable")}
    is_rank_0 = len(others) > 1 and others <= cut_off and not joined_not
    for problem in found:
        if problem.kind not in ("missing", "unreachable"):
            yield problem
        elif is_rank_0:
            yield SelftestProblem(
                node=results.node_of(0), kind="unreachable", check=problem.check, rank=0,
                message=f"none of the other {len(others)} ranks could join rank 0",
            )  # fmt: skip
        elif problem.rank not in joined_not and not (problem.kind == "unreachable" and 0 in joined_not):
            yield problem
