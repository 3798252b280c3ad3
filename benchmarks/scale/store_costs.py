"""Measurements of the rendezvous and of process groups: requests at the store, and seconds.

The ranks are threads of one process, each with a connection of its own to a real TCPStore, and run hpcaccel's code.
Requests are counted between the code and torch's store.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

__all__ = ["CountedStore", "check_in", "counting_store", "group_creation", "request_seconds"]

LIMIT = timedelta(seconds=120)


class CountedStore:
    """Counts the requests of one rank. ``polls`` are those that rank 0 repeats while it waits for other ranks."""

    def __init__(self, prefix: str, store: Any) -> None:
        import torch.distributed as dist

        self._store = dist.PrefixStore(prefix, store)
        self.requests: Counter[str] = Counter()
        store_counts[threading.get_ident()] = self

    def add(self, key: str, amount: int) -> int:
        self.requests["poll" if amount == 0 else "add"] += 1
        return int(self._store.add(key, amount))

    def set(self, key: str, value: str) -> None:
        self.requests["set"] += 1
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.requests["wait"] += 1
        self._store.wait(keys, timeout)


store_counts: dict[int, CountedStore] = {}
"""The store of each thread's rank."""


def check_in(ranks: int) -> dict[str, Any]:
    """Run the check-in of ``ranks`` ranks.

    Returns:
        Requests without rank 0's polls, those of rank 0 alone, and the seconds from the first rank's begin to the last
        rank's end.
    """
    import torch.distributed as dist

    from hpcaccel.runtime.distributed import rendezvous

    server = _store(0, serves=True)
    clients = [_store(server.port, serves=False) for _ in range(ranks)]
    counted: list[Counter[str]] = [Counter() for _ in range(ranks)]
    module: Any = rendezvous
    before, ended = module.dist, [0.0] * ranks
    module.dist = SimpleNamespace(PrefixStore=CountedStore, DistError=dist.DistError)
    begin = threading.Barrier(ranks + 1)

    def meet(rank: int) -> None:
        env: Any = SimpleNamespace(
            rank=rank, world_size=ranks, local_world_size=ranks, key="scale", master_addr="127.0.0.1"
        )
        begin.wait()
        rendezvous._check_in(clients[rank], env, LIMIT)
        ended[rank] = time.perf_counter()
        counted[rank] = store_counts[threading.get_ident()].requests

    try:
        started = _in_threads(meet, ranks, begin)
    finally:
        module.dist = before
        store_counts.clear()
    without_polls = [sum(one.values()) - one["poll"] for one in counted]
    return {"requests": sum(without_polls), "first": without_polls[0], "seconds": max(ended) - started}


def request_seconds(clients: int = 8, each: int = 400) -> float:
    """Seconds that a store needs for one request while ``clients`` clients send requests without a pause."""
    server = _store(0, serves=True)
    stores = [_store(server.port, serves=False) for _ in range(clients)]
    begin = threading.Barrier(clients + 1)
    ended = [0.0] * clients

    def ask(number: int) -> None:
        begin.wait()
        for _ in range(each):
            stores[number].add("n", 1)
        ended[number] = time.perf_counter()

    started = _in_threads(ask, clients, begin)
    return (max(ended) - started) / (clients * each)


def group_creation(ranks: int, *, lazy: bool) -> dict[str, Any]:
    """Create a gloo group of ``ranks`` ranks, with torch's lazy connections or without, and reduce one number.

    Returns:
        Requests at the store and open descriptors, all for all ranks together.
    """
    counters: list[Any] = []
    server = _store(0, serves=True)
    for _ in range(ranks):
        counters.append(counting_store(_store(server.port, serves=False)))
    before = len(os.listdir("/proc/self/fd"))
    groups = _groups(counters, lazy=lazy)
    _reduce(groups, turns=1)
    sockets = len(os.listdir("/proc/self/fd")) - before
    del groups
    return {
        "requests": sum(sum(counter.requests.values()) for counter in counters),
        "descriptors": sockets,
    }


def _reduce(groups: list[Any], *, turns: int) -> list[list[float]]:
    """Seconds of each all-reduce of one number, by rank and turn."""
    import torch

    begin = threading.Barrier(len(groups) + 1)
    taken = [[0.0] * turns for _ in groups]

    def reduce(rank: int) -> None:
        begin.wait()
        for turn in range(turns):
            value = torch.zeros(1, dtype=torch.int64)
            started = time.perf_counter()
            groups[rank].allreduce([value]).wait()
            taken[rank][turn] = time.perf_counter() - started

    _in_threads(reduce, len(groups), begin)
    return taken


def _groups(stores: list[Any], *, lazy: bool) -> list[Any]:
    import torch.distributed as dist

    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    groups: list[Any] = [None] * len(stores)
    begin = threading.Barrier(len(stores) + 1)

    def create(rank: int) -> None:
        begin.wait()
        groups[rank] = dist.ProcessGroupGloo(stores[rank], rank, len(stores), LIMIT)

    _in_threads(create, len(stores), begin)
    return groups


def _in_threads(call: Callable[[int], None], ranks: int, begin: threading.Barrier) -> float:
    """Call ``call(rank)`` in a thread for each rank; return when they began, by ``time.perf_counter``."""
    failed: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            call(rank)
        except BaseException as error:
            failed.append(error)
            begin.abort()

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    begin.wait(60)
    started = time.perf_counter()
    for thread in threads:
        thread.join(LIMIT.total_seconds())
    if failed:
        raise failed[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"{ranks} ranks have not met within {LIMIT.total_seconds():.0f} s")
    return started


def _store(port: int, *, serves: bool) -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, None, serves, LIMIT, wait_for_workers=False)


def counting_store(store: Any) -> Any:
    import torch.distributed as dist

    class Counting(dist.Store):
        def __init__(self) -> None:
            super().__init__()
            self.requests: Counter[str] = Counter()

        def set(self, key: str, value: Any) -> None:
            self.requests["set"] += 1
            store.set(key, value)

        def get(self, key: str) -> bytes:
            self.requests["get"] += 1
            return bytes(store.get(key))

        def add(self, key: str, value: int) -> int:
            self.requests["add"] += 1
            return int(store.add(key, value))

        def wait(self, *arguments: Any) -> None:
            self.requests["wait"] += 1
            store.wait(*arguments)

        def check(self, keys: list[str]) -> bool:
            self.requests["check"] += 1
            return bool(store.check(keys))

    return Counting()
