"""Rendezvous: the ranks of a job find each other, whatever else uses the node and its ports."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.runtime.distributed import port_discovery, rank_env, rendezvous

from .ranks import PROGRAMS, ROOT, free_port, start

pytestmark = pytest.mark.torch


def step(job: int, size: int, **more: str) -> list[dict[str, str]]:
    """The environment of each task of a step on this machine."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCACCEL_"))}
    shared = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(size),
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    return [
        {**outside, **shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **more} for rank in range(size)
    ]


class Meeting:
    """Ranks in a rendezvous."""

    def __init__(self, environs: list[dict[str, str]], **words: Any) -> None:
        self.processes = start([str(PROGRAMS / "meet.py"), json.dumps(words)], environs)

    def results(self) -> list[dict[str, Any]]:
        found = []
        for process in self.processes:
            said, _ = process.communicate(timeout=120)
            lines = [line for line in said.splitlines() if line.startswith("{")]
            assert lines, said
            found.append(json.loads(lines[-1]))
        return found


def ports_of(job: int) -> tuple[int, ...]:
    return rank_env.detect(step(job, 2)[0]).ports


@contextmanager
def silent_listener(port: int) -> Iterator[None]:
    with socket.create_server(("", port)):
        yield


@contextmanager
def http_server(port: int) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Tests need no access log."""

    with ThreadingHTTPServer(("", port), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


@contextmanager
def foreign_store(port: int) -> Iterator[None]:
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield
    del store


@contextmanager
def foreign_discovery(port: int) -> Iterator[None]:
    other = port_discovery.PortDiscovery.open("another job's", [port], 1)
    assert other is not None
    yield
    other.close()


def test_two_jobs_with_the_same_occupied_ports_form_their_own_groups() -> None:
    # Job IDs that differ by a multiple of PORTS have the same candidate ports in the same order.
    first, second = 4_711, 4_711 + port_discovery.PORTS
    ports = ports_of(first)
    assert ports == ports_of(second)
    with ExitStack() as stack:
        for number, service in enumerate((silent_listener, http_server, foreign_store, foreign_discovery)):
            stack.enter_context(service(ports[number]))
        # Rank 0 of the first job starts 3 s later than all other ranks.
        meetings = [Meeting(step(first, 2, LATE="3")), Meeting(step(second, 2))]
        results = [meeting.results() for meeting in meetings]
    for job, found in zip((first, second), results, strict=True):
        assert found == [{"rank": rank, "sum": 11.0, "job": str(job)} for rank in range(2)]


def test_missing_rank_is_named_in_the_error() -> None:
    with ExitStack() as stack:
        stack.enter_context(silent_listener(ports_of(99)[0]))
        without_last = Meeting(step(99, 3)[:2], timeout=4)
        without_first = Meeting(step(98, 2)[1:], timeout=4)
        main, other = without_last.results()
        (lonely,) = without_first.results()
    assert "rank 2 of 3 did not reach localhost within" in main["error"]
    assert "rank 1 of 3 could not complete the rendezvous with the other ranks at" in other["error"]
    assert "rank 1 of 2 has not found rank 0 on localhost after" in lonely["error"]
    assert f"connection refused (ports {ports_of(98)[0]}, " in lonely["error"]


def test_given_port_is_used_or_reported_as_occupied() -> None:
    port, taken = free_port(), free_port()
    good = Meeting(step(97, 2, MASTER_PORT=str(port)))
    with silent_listener(taken):
        bad = Meeting(step(96, 2, MASTER_PORT=str(taken))[:1], timeout=4)
        (refused,) = bad.results()
    assert [found["sum"] for found in good.results()] == [11.0, 11.0]
    assert f"rank 0 of 2 could not join the other ranks at localhost:{taken}" in refused["error"]
    assert "that the port is free" in refused["error"]


def test_ranks_of_one_node_connect_as_soon_as_rank_0_accepts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, unused = free_port(), free_port()
    refused: list[bool] = []

    def connect(host: str, where: int, timeout: timedelta, *, serves: bool) -> object:
        with socket.socket() as client:
            refused.append(client.connect_ex((host, where)) != 0)
        return object()

    def make(number: int, *, ranks_here: int = 2, **seconds: float) -> object:
        env = replace(rank_env.detect(step(92, 2, MASTER_PORT=str(number))[1]), local_world_size=ranks_here)
        return rendezvous._make(env, "env://", timedelta(**seconds))

    monkeypatch.setattr(rendezvous, "_tcp_store", connect)
    late = threading.Timer(0.3, lambda: stack.enter_context(silent_listener(port)))
    with ExitStack() as stack:
        late.start()
        make(port, seconds=60)
        late.join()
    assert refused == [False]
    # TCPStore's own retries are for ranks on several nodes.
    make(unused, ranks_here=1, seconds=60)
    assert refused == [False, True]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("hpcaccel.runtime.distributed.port_discovery.WARNING_SECONDS", 0.1)
    with pytest.raises(RankEnvironmentError, match=r"rank 1 of 2 could not join the other ranks .* were refused for"):
        make(unused, seconds=0.2)
    assert capsys.readouterr().err.count("rank 1 of 2 has waited") == 1
    assert refused == [False, True]


def test_init_method_is_used(tmp_path: Path) -> None:
    by_file = Meeting(step(95, 2), init_method=f"file://{tmp_path}/meet")
    by_port = Meeting(step(94, 2), init_method=f"tcp://127.0.0.1:{free_port()}")
    nowhere = Meeting(step(93, 2), init_method="pigeon://coop")
    assert [found["sum"] for found in by_file.results() + by_port.results()] == [11.0] * 4
    assert all("pigeon" in found["error"] for found in nowhere.results())


def test_port_discovery_responds_to_its_own_name_only() -> None:
    port = free_port()
    opened = port_discovery.PortDiscovery.open("mine", [port], 4321)
    assert opened is not None
    with socket.create_connection(("127.0.0.1", port)):  # a client that sends nothing
        assert port_discovery.query("mine", "localhost", port)[1] == 4321
        assert port_discovery.query("yours", "127.0.0.1", port) == port_discovery.OTHER_SERVICE
    opened.close()
    assert port_discovery.query("mine", "127.0.0.1", port) == port_discovery.REFUSED
    assert port_discovery.query("mine", "no-such-host.invalid", port) == port_discovery.UNKNOWN_HOST


def test_port_discovery_takes_the_first_free_port() -> None:
    taken, free = free_port(), free_port()
    with silent_listener(taken):
        opened = port_discovery.PortDiscovery.open("mine", [taken, free], 4321)
        assert opened is not None
        assert port_discovery.query("mine", "127.0.0.1", free)[1] == 4321
        assert port_discovery.PortDiscovery.open("other", [taken, free], 4321) is None
        opened.close()


def test_network_interfaces_and_addresses_are_found() -> None:
    assert rendezvous.interface_of("127.0.0.1") == "lo"
    assert rendezvous.interface_of("127.0.1.7") == "lo"
    assert rendezvous.interface_of("192.0.2.1") is None  # reserved for documentation
    assert rendezvous.name_is_loopback("localhost")
    assert rendezvous.name_is_loopback("no-such-host.invalid")
    assert rendezvous.own_address_towards("127.0.0.1") == "127.0.0.1"
    assert rendezvous.own_address_towards("no-such-host.invalid") is None


PLACE = rank_env.RankEnvironment(
    rank=0, world_size=4, local_rank=0, local_world_size=2, master_addr="n1", master_port=1, source="slurm"
)
"""Rank 0 on n1. On n1 that name is a loopback address."""


@pytest.mark.parametrize(
    ("rank", "change", "given", "chosen"),
    [
        pytest.param(2, {}, None, "eth1", id="another node: the one that leads to rank 0"),
        pytest.param(0, {}, None, "eth0", id="the node of rank 0: the one that leads to another"),
        pytest.param(2, {}, "ib0", "ib0", id="what the user has said"),
        pytest.param(2, {"local_world_size": 4}, None, None, id="all on one node"),
    ],
)
def test_gloo_interface_is_set_where_the_node_name_is_a_loopback(
    monkeypatch: pytest.MonkeyPatch, rank: int, change: dict[str, Any], given: str | None, chosen: str | None
) -> None:
    ways = {"n1": "127.0.1.1" if rank == 0 else "10.0.0.2", "10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(rendezvous, "name_is_loopback", lambda host: True)
    monkeypatch.setattr(rendezvous, "own_address_towards", ways.get)
    monkeypatch.setattr(rendezvous, "interface_of", {"10.0.0.1": "eth0", "10.0.0.2": "eth1"}.get)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given or "")
    store = dist.HashStore()  # type: ignore[attr-defined]
    choice = rendezvous.GlooInterface(replace(PLACE, rank=rank, **change), store)
    store.set("reached from", "10.0.0.2")
    choice.select()
    assert os.environ["GLOO_SOCKET_IFNAME"] == (chosen or "")
