"""Checks of how the ranks meet: rank environment, rendezvous, equal world sizes, and TCP connections between all nodes.

They use only the ranks' store and sockets, so that a failure names the node before a process group would hang.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpcaccel.core.process_identity import node_name
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.runtime.distributed.rank_env import RankEnvironment
from hpcaccel.runtime.distributed.rendezvous import address_is_loopback, base_store, own_address_towards
from hpcaccel.runtime.selftest.check_runner import CheckFailed, CheckRunner, Fault
from hpcaccel.slurm import hostlist

__all__ = ["JoinedRanks", "RankFacts", "check_reach", "check_world_size", "expected_places", "meet", "wait_for_all"]

CONNECT_SECONDS = 5.0
"""Time limit for one TCP connection to another node."""
LOOK_SECONDS = 2.0
"""Interval at which rank 0 looks for killed ranks while it waits."""
CONNECTIONS = 32
"""Number of connections that a rank opens at a time."""
_MISSING = re.compile(r"ranks? (?P<ranks>[\d, ]+)( …)? of \d+ did not reach")


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Facts about a rank, which it publishes in the ranks' store."""

    rank: int
    world_size: int
    node: str
    address: str
    port: int
    """The rank listens there until all nodes have tried to connect. 0 if the rank is not the first of its node."""


@dataclass(frozen=True)
class JoinedRanks:
    """This rank's environment, the store, and the facts about all ranks."""

    env: RankEnvironment
    store: Any
    facts: Sequence[RankFacts]

    @property
    def first_of_nodes(self) -> list[int]:
        """The lowest rank of each node."""
        first: dict[str, int] = {}
        for one in self.facts:
            first.setdefault(one.node, one.rank)
        return sorted(first.values())


def expected_places(env: RankEnvironment) -> list[str]:
    """The node of each rank, according to the variables of the Slurm step; empty if they do not determine it."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    layout = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE")
    if not nodes or not layout:
        return []
    try:
        pairs = zip(hostlist.expand(nodes), hostlist.tasks_per_node(layout), strict=False)
        places = [node for node, tasks in pairs for _ in range(tasks)]
    except ValueError:
        return []
    return places if len(places) == env.world_size else []


def check_world_size(env: RankEnvironment, expected: int | None) -> None:
    """Compare the world size in this rank's environment with the number of ranks that were started.

    Raises:
        CheckFailed: they differ.
    """
    if expected is not None and env.world_size != expected:
        raise CheckFailed(
            Fault(
                kind="world_size",
                message=f"this rank's environment has a world size of {env.world_size} ({env.source} variables), but "
                f"{expected} ranks were started",
            )
        )


def meet(env: RankEnvironment, door: socket.socket | None, *, timeout_seconds: float) -> JoinedRanks:
    """Check in at the ranks' store, and exchange the facts about all ranks.

    Args:
        door: the socket at which this rank listens, if it is the first of its node.

    Raises:
        CheckFailed: ranks are missing, cannot be reached, exist twice, or have different world sizes.
    """
    try:
        store = base_store(env, timeout=timedelta(seconds=timeout_seconds))
    except RankEnvironmentError as error:
        raise CheckFailed(_rendezvous_fault(env, str(error))) from None
    own = RankFacts(
        rank=env.rank,
        world_size=env.world_size,
        node=node_name(),
        address=_address(env),
        port=0 if door is None else int(door.getsockname()[1]),
    )
    store = dist.PrefixStore("selftest", store)
    store.set(f"facts/{env.rank}", json.dumps(vars(own)))
    if env.rank == 0:
        everything = [json.loads(store.get(f"facts/{rank}")) for rank in range(env.world_size)]
        store.set("facts", json.dumps(everything))
    facts = [RankFacts(**one) for one in json.loads(store.get("facts"))]
    if faults := list(_size_faults(facts, own)):
        raise CheckFailed(*faults)
    return JoinedRanks(env, store, facts)


def _rendezvous_fault(env: RankEnvironment, message: str) -> Fault:
    """Whom the message of a failed rendezvous names: the missing ranks (rank 0's message), or this rank."""
    if match := _MISSING.search(message):
        ranks = [int(text) for text in match["ranks"].split(",")]
        return Fault(kind="missing", message=message, ranks=ranks)
    if "two processes have rank" in message:
        return Fault(kind="twice", message=message)
    if "could not complete the rendezvous" in message:
        return Fault(kind="error", message=message, ranks=())  # this rank has reached rank 0
    return Fault(kind="unreachable", message=message)


def _size_faults(facts: Sequence[RankFacts], own: RankFacts) -> Sequence[Fault]:
    sizes = {one.rank: one.world_size for one in facts} | {own.rank: own.world_size}
    different = [rank for rank, size in sizes.items() if size != len(facts)]
    if not different:
        return ()
    shown = ", ".join(f"rank {rank}: {sizes[rank]}" for rank in different[:8])
    message = f"the ranks have different world sizes (rank 0: {len(facts)}; {shown})"
    return (Fault(kind="world_size", message=message, ranks=different),)


def _address(env: RankEnvironment) -> str:
    address = own_address_towards(env.master_addr)
    return env.master_addr if address is None or address_is_loopback(address) else address


def wait_for_all(
    ranks: JoinedRanks, what: str, *, timeout_seconds: float, bad: bool = False, killed: Callable[[], set[int]] = set
) -> int:
    """Wait in the store until all ranks have called this. Returns the number of ranks that passed ``bad``.

    Args:
        killed: returns the ranks that were killed; rank 0 does not wait for them.

    Raises:
        CheckFailed: ranks are missing after ``timeout_seconds``, or were killed. The fault that rank 0 reports names
            them.
    """
    store, env = ranks.store, ranks.env
    if bad:
        store.add(f"{what}/bad", 1)
    store.set(f"{what}/{env.rank}", "here")
    started = time.monotonic()
    look = started + LOOK_SECONDS
    missing = list(range(env.world_size)) if env.rank == 0 else []
    while missing := [rank for rank in missing if not store.check([f"{what}/{rank}"])]:
        now = time.monotonic()
        lost = killed() & set(missing) if now > look else ()
        if lost or now - started > timeout_seconds:
            missing = sorted(lost or missing)
            who = ", ".join(map(str, missing[:16]))
            message = f"rank {who} had not finished {what} after {now - started:.0f} s"
            raise CheckFailed(Fault(kind="missing", message=message, ranks=missing))
        look = now + LOOK_SECONDS if now > look else look
        time.sleep(0.02)
    if env.rank == 0:
        store.set(f"{what}/all", "here")
    else:
        try:
            store.wait([f"{what}/all"], timedelta(seconds=timeout_seconds + 5))
        except dist.DistError:
            message = f"not all ranks had finished {what} after {timeout_seconds:.0f} s"
            raise CheckFailed(Fault(kind="error", message=message, ranks=())) from None
    return int(store.add(f"{what}/bad", 0))


# -- connections between the nodes -------------------------------------------------------------------------------------


def listen() -> socket.socket:
    """A socket that listens on all interfaces and accepts connections in the background until it is closed."""
    door = socket.create_server(("", 0), backlog=256)
    threading.Thread(target=_accept, args=(door,), daemon=True).start()
    return door


def _accept(door: socket.socket) -> None:
    while True:
        try:
            guest, _ = door.accept()
        except OSError:
            return
        guest.close()


def check_reach(ranks: JoinedRanks, door: socket.socket | None, runner: CheckRunner, *, timeout_seconds: float) -> bool:
    """Open a TCP connection to the first rank of every other node. Returns whether all nodes reach each other."""
    failed: Mapping[int, str] = {}
    others = [ranks.facts[rank] for rank in ranks.first_of_nodes if rank != ranks.env.rank]
    if door is not None and others:
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            found = pool.map(_connect, others)
            failed = {one.rank: why for one, why in zip(others, found, strict=True) if why}
        for rank, why in failed.items():
            other = ranks.facts[rank]
            message = f"cannot connect to {other.node} at {other.address}:{other.port}: {why}"
            runner.report(Fault(kind="no_connection", message=message, ranks=()))
        runner.measure(unreachable=sorted(failed))
    count = wait_for_all(ranks, "the connections between nodes", timeout_seconds=timeout_seconds, bad=bool(failed))
    return count == 0


def _connect(other: RankFacts) -> str:
    """Why the rank cannot be reached; empty if it can."""
    try:
        with closing(socket.create_connection((other.address, other.port), timeout=CONNECT_SECONDS)):
            return ""
    except TimeoutError:
        return f"no reply within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
