"""Rendezvous of the ranks: a store, usually on rank 0, kept for the life of the process, in which all ranks check in.

If the port is given (torchrun, hpcaccel's supervisor, MASTER_PORT), the store listens on it. Otherwise no port is
certain to be free, so the store takes any free port and ``port_discovery`` publishes it. Rank 0 may start minutes after
the other ranks.

After the check-in, if other nodes cannot reach gloo's default network interface, gloo is configured with an interface
that they can reach.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.runtime.distributed.rank_env import RankEnvironment, is_set
from hpcaccel.runtime.distributed.wide_groups import allow_connections

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.port_discovery import PortDiscovery

__all__ = [
    "GlooInterface",
    "address_is_loopback",
    "base_store",
    "interface_of",
    "name_is_loopback",
    "own_address_towards",
]

WARNING_SECONDS = 60.0
"""Time after which rank 0 prints a warning about missing ranks."""
SIOCGIFADDR = 0x8915
"""Linux's request for an interface's IPv4 address: netdevice(7)."""
KEYS_PER_REQUEST = 512
"""Number of keys whose existence one request checks."""
_ARRIVED = "arrived"
"""Key of the store: number of registrations."""
ANY_PORT = 9
"""Destination port of a UDP socket that is connected to find the route, and sends nothing."""
IPV6_ADDRESSES = Path("/proc/net/if_inet6")

_stores: dict[tuple[int, str], Any] = {}
"""Stores by process id and rendezvous URL."""
_services: list[PortDiscovery] = []
"""Rank 0's port discovery, open until all ranks have checked in."""


def base_store(env: RankEnvironment, *, init_method: str | None = None, timeout: timedelta) -> Any:
    """The store in which all ranks have checked in. It is created once per process and ``init_method``.

    Raises:
        RankEnvironmentError: ranks are missing after ``timeout``, two processes have the same rank, or the store could
            not be created or reached.
    """
    url = init_method or "env://"
    key = os.getpid(), url  # a forked process does not belong to its parent's group
    if key not in _stores:
        _stores[key] = _check_in(_make(env, url, timeout), env, timeout)
    return _stores[key]


def _make(env: RankEnvironment, init_method: str, timeout: timedelta) -> Any:
    if env.rank == 0:
        allow_connections(env.world_size)
    try:
        if init_method != "env://":
            rendezvous = dist.rendezvous
            store, _, _ = next(rendezvous(init_method, env.rank, env.world_size, timeout=timeout))
            return store
        if env.ports:
            return _at_discovered_port(env, timeout)
        # With this variable, torchrun's agent already runs the store.
        exists = is_set("TORCHELASTIC_USE_AGENT_STORE")
        serves = env.rank == 0 and not exists
        # On several nodes TCPStore's own retries, at random times, are better than polls by thousands of ranks.
        if not (serves or exists) and env.world_size == env.local_world_size:
            from hpcaccel.runtime.distributed.port_discovery import wait_for_listener

            wait_for_listener(
                env.master_addr,
                env.master_port,
                rank=env.rank,
                world_size=env.world_size,
                timeout_seconds=timeout.total_seconds(),
            )
        return _tcp_store(env.master_addr, env.master_port, timeout, serves=serves)
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{env.master_addr}:{env.master_port}" if init_method == "env://" else init_method
        raise RankEnvironmentError(
            f"rank {env.rank} of {env.world_size} could not join the other ranks at {where}: {_first_line(error)}. "
            "Check that all ranks have started, that this node can reach the address, and that the port is free"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _tcp_store(host: str, port: int, timeout: timedelta, *, serves: bool) -> Any:
    # Multi-tenant: a library that creates a store at MASTER_PORT as rank 0 gets this store.
    return dist.TCPStore(host, port, None, serves, timeout, wait_for_workers=False, multi_tenant=serves)


def _at_discovered_port(env: RankEnvironment, timeout: timedelta) -> Any:
    from hpcaccel.runtime.distributed.port_discovery import PortDiscovery, find_store

    if env.rank != 0:
        host, port = find_store(
            env.key,
            env.master_addr,
            env.ports,
            rank=env.rank,
            world_size=env.world_size,
            timeout_seconds=timeout.total_seconds(),
        )
        os.environ["MASTER_PORT"] = str(port)
        return _tcp_store(host, port, timeout, serves=False)
    store = _tcp_store("127.0.0.1", 0, timeout, serves=True)
    service = PortDiscovery.open(env.key, env.ports, store.port)
    if service is None:
        raise RankEnvironmentError(
            f"none of the ports {', '.join(map(str, env.ports))} is free on rank 0's node {socket.gethostname()}. "
            "Set MASTER_PORT to a free port"
        )
    os.environ["MASTER_PORT"] = str(store.port)
    _services.append(service)
    return store


# -- check-in ----------------------------------------------------------------------------------------------------------


def _check_in(store: Any, env: RankEnvironment, timeout: timedelta) -> Any:
    """Register this rank in the store, and wait until all ranks have registered. Rank 0's error lists the missing
    ranks. Returns the store with this group's key prefix.

    Raises:
        RankEnvironmentError: ranks are missing, or two processes have the same rank.
    """
    shared = dist.PrefixStore(f"hpcaccel/{env.key}", store)
    try:
        interface = GlooInterface(env, shared)
        # In torchrun's own store a rank registers again after a restart.
        if shared.add(_claim(env.rank), 1) > 1 and not is_set("TORCHELASTIC_USE_AGENT_STORE"):
            raise RankEnvironmentError(
                f"two processes have rank {env.rank} of {env.world_size} at {env.master_addr}. "
                "Check that the ranks were started only once, and that RANK differs between them"
            )
        shared.add(_ARRIVED, 1)
        if env.rank == 0:
            _wait_for_all(shared, env, timeout)
            shared.set("all", "here")
        else:
            shared.wait(["all"], timeout)
        interface.select()
    except dist.DistError as error:
        raise RankEnvironmentError(
            f"rank {env.rank} of {env.world_size} could not complete the rendezvous with the other ranks at "
            f"{env.master_addr} (timeout: {timeout.total_seconds():.0f} s): {_first_line(error)}. "
            "Rank 0's error message lists the missing ranks"
        ) from error
    finally:
        while _services:
            _services.pop().close()
    return shared


def _wait_for_all(shared: Any, env: RankEnvironment, timeout: timedelta) -> None:
    """Wait until every rank has registered. A poll is one request, however many ranks there are."""
    started = time.monotonic()
    warned = False
    while shared.add(_ARRIVED, 0) < env.world_size or not _all_have_claimed(shared, env.world_size):
        waited = time.monotonic() - started
        expired, slow = waited > timeout.total_seconds(), waited > WARNING_SECONDS and not warned
        missing = _missing_ranks(shared, env.world_size) if expired or slow else []
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:16]))}{' …' * (len(missing) > 16)}"
        if expired and missing:
            raise RankEnvironmentError(
                f"{who} of {env.world_size} did not reach {env.master_addr} within {waited:.0f} s. "
                "Check that all ranks have started, and that their nodes can reach that address"
            )
        if slow and missing:
            warned = True
            print(f"hpcaccel: rank 0 has waited {waited:.0f} s for {who}", file=sys.stderr, flush=True)
        time.sleep(0.01 if waited < 5 else 0.2)


def _all_have_claimed(shared: Any, world_size: int) -> bool:
    """Whether all ranks have registered. In torchrun's own store the count alone may include a rank twice."""
    claims = [_claim(rank) for rank in range(world_size)]
    return all(
        shared.check(claims[first : first + KEYS_PER_REQUEST]) for first in range(0, world_size, KEYS_PER_REQUEST)
    )


def _missing_ranks(shared: Any, world_size: int) -> list[int]:
    return [rank for rank in range(world_size) if not shared.check([_claim(rank)])]


def _claim(rank: int) -> str:
    return f"claimed/{rank}"


# -- the network interface of gloo -------------------------------------------------------------------------------------


class GlooInterface:
    """Selects gloo's network interface, on nodes where gloo would choose a loopback interface.

    Gloo listens at the address of the node's host name, which on many systems is a loopback address that other nodes
    cannot reach. Ranks that are not on rank 0's node use the interface of the route to that node, and publish their
    address. Ranks on rank 0's node use the interface of the route to the published address. GLOO_SOCKET_IFNAME
    overrides the choice.
    """

    def __init__(self, env: RankEnvironment, store: Any) -> None:
        self._store = store
        self._address: str | None = None
        several_nodes = env.world_size > env.local_world_size
        self._wanted = (
            several_nodes and not os.environ.get("GLOO_SOCKET_IFNAME") and name_is_loopback(socket.gethostname())
        )
        if several_nodes:
            self._address = own_address_towards(env.master_addr)
            if self._address is not None and not address_is_loopback(self._address):
                store.set("reached from", self._address)

    def select(self) -> None:
        """Set GLOO_SOCKET_IFNAME if needed, after all ranks have checked in."""
        if not self._wanted or not self._store.check(["reached from"]):
            return
        address = self._address
        if address is None or address_is_loopback(address):
            address = own_address_towards(self._store.get("reached from").decode())
        name = None if address is None else interface_of(address)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def name_is_loopback(host: str) -> bool:
    """Whether a host name resolves only to loopback addresses, or not at all."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return True
    return all(address_is_loopback(str(entry[4][0])) for entry in found)


def address_is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address_towards(host: str) -> str | None:
    """This node's address on the route to ``host``; None if there is no route or no such host. Sends no data."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as connected:
            connected.connect(address)
            return str(connected.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The name of the interface that has ``address``; None if there is no such interface."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    for _, name in socket.if_nameindex():
        if wanted in _addresses(name):
            return name
    # All of 127.0.0.0/8 belongs to the loopback interface, which lists only one address.
    return "lo" if wanted.is_loopback else None


def _addresses(interface: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            reply = fcntl.ioctl(control.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            found.append(ipaddress.IPv4Address(reply[20:24]))
        except OSError:
            pass  # the interface has no IPv4 address
    if IPV6_ADDRESSES.exists():
        for line in IPV6_ADDRESSES.read_text().splitlines():
            fields = line.split()
            if fields[5] == interface:
                found.append(ipaddress.IPv6Address(int(fields[0], 16)))
    return found
