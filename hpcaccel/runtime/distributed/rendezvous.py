"""Where the ranks meet: a store at rank 0, kept for the life of the process, whatever groups come and go.

Who has chosen the port (torchrun, hpcaccel's supervisor, MASTER_PORT) gets the store there. Otherwise there is no port
that is sure to be free: another job may have it, or a service. Then rank 0 listens in a *lobby* on the first of a few
ports that is free and tells whoever knows the name of the group where the store is; the others try the same ports in
turn until somebody answers to that name. A service that says nothing, something else, or another group's name is
passed by, and rank 0 may come minutes later than the others.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.runtime.distributed.rank_env import RankEnvironment, is_set

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.port_discovery import Lobby

__all__ = ["base_store"]

PATIENCE_SECONDS = 60.0
"""After so long a rank that finds nobody says so."""
NAME_SECONDS = 60.0
"""For so long an address may be unknown: name services are late at the start of a job now and then."""
LONGEST_PAUSE_SECONDS = 2.0

_stores: dict[tuple[int, str], Any] = {}


def base_store(env: RankEnvironment, *, init_method: str | None = None, timeout: timedelta) -> Any:
    """The store in which all ranks have checked in; made once, and the same ever after.

    Raises:
        RankEnvironmentError: the ranks did not find each other within ``timeout``.
    """
    url = init_method or "env://"
    mine = os.getpid(), url  # a forked process has other ranks around it than its parent
    if mine not in _stores:
        _stores[mine] = _check_in(_make(env, url, timeout), env, timeout)
    return _stores[mine]


def _make(env: RankEnvironment, init_method: str, timeout: timedelta) -> Any:
    try:
        if init_method != "env://":
            rendezvous = dist.rendezvous  # type: ignore[attr-defined]
            store, _, _ = next(rendezvous(init_method, env.rank, env.world_size, timeout=timeout))
            return store
        if env.ports:
            return _through_lobby(env, timeout)
        return _at_given_port(env, timeout)
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{env.master_addr}:{env.master_port}" if init_method == "env://" else init_method
        raise RankEnvironmentError(
            f"rank {env.rank} of {env.world_size} could not join the others at {where}: {_first_line(error)}. "
            "Did all ranks start, is the address reachable from this node, and is the port free?"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _at_given_port(env: RankEnvironment, timeout: timedelta) -> Any:
    # torchrun has started the store itself.
    serves = env.rank == 0 and not is_set("TORCHELASTIC_USE_AGENT_STORE")
    return _tcp_store(env.master_addr, env.master_port, timeout, serves=serves)


def _tcp_store(host: str, port: int, timeout: timedelta, *, serves: bool) -> Any:
    # Multi-tenant: a library that reads MASTER_PORT and makes a store of its own there, as rank 0, gets this one.
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, serves, timeout, wait_for_workers=False, multi_tenant=serves
    )


# -- the lobby ---------------------------------------------------------------------------------------------------------


def _through_lobby(env: RankEnvironment, timeout: timedelta) -> Any:
    if env.rank == 0:
        return _serve(env, timeout)
    host, port = _ask(env, timeout)
    os.environ["MASTER_PORT"] = str(port)
    return _tcp_store(host, port, timeout, serves=False)


def _serve(env: RankEnvironment, timeout: timedelta) -> Any:
    from hpcaccel.runtime.distributed.port_discovery import Lobby

    store = _tcp_store("127.0.0.1", 0, timeout, serves=True)
    lobby = Lobby.open(env.key, env.ports, store.port)
    if lobby is None:
        raise RankEnvironmentError(
            f"none of the ports {', '.join(map(str, env.ports))} is free on {socket.gethostname()}, the node of "
            "rank 0. Set MASTER_PORT to one that is"
        )
    os.environ["MASTER_PORT"] = str(store.port)
    _lobbies.append(lobby)
    return store


_lobbies: list[Lobby] = []
"""Open until all ranks have checked in."""


def _ask(env: RankEnvironment, timeout: timedelta) -> tuple[str, int]:
    """Try all ports in turn until rank 0 answers: its address, and the port of its store."""
    from hpcaccel.runtime.distributed import port_discovery as lobby

    begun = time.monotonic()
    pause, told = 0.05, False
    while True:
        seen: dict[int, str] = {}
        for port in env.ports:
            answer = lobby.ask(env.key, env.master_addr, port)
            if isinstance(answer, tuple):
                return answer
            seen[port] = answer
        waited = time.monotonic() - begun
        unknown = set(seen.values()) == {lobby.UNKNOWN_NAME}
        if waited > timeout.total_seconds() or (unknown and waited > NAME_SECONDS):
            raise RankEnvironmentError(_nobody(env, seen, waited))
        if waited > PATIENCE_SECONDS and not told:
            told = True
            print(f"hpcaccel: {_nobody(env, seen, waited)} Still waiting.", file=sys.stderr, flush=True)
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)


def _nobody(env: RankEnvironment, seen: dict[int, str], waited: float) -> str:
    kinds: dict[str, list[str]] = {}
    for port, what in seen.items():
        kinds.setdefault(what, []).append(str(port))
    found = "; ".join(f"{what} (port {', '.join(ports)})" for what, ports in kinds.items())
    return (
        f"rank {env.rank} of {env.world_size} has found no rank 0 on {env.master_addr} for {waited:.0f} s: {found}. "
        "Did rank 0 start, and can this node reach that address? MASTER_ADDR and MASTER_PORT name another."
    )


# -- checking in -------------------------------------------------------------------------------------------------------


def _check_in(store: Any, env: RankEnvironment, timeout: timedelta) -> Any:
    """Every rank says that it is here; rank 0 waits for all, so that whoever is missing is known by number.

    Raises:
        RankEnvironmentError: some did not come, or two call themselves by one number.
    """
    shared = dist.PrefixStore(f"hpcaccel/{env.key}", store)  # type: ignore[attr-defined]
    try:
        # torchrun's own store sees one number again when it starts the ranks anew.
        if shared.add(f"claimed/{env.rank}", 1) > 1 and not is_set("TORCHELASTIC_USE_AGENT_STORE"):
            raise RankEnvironmentError(
                f"two processes say that they are rank {env.rank} of {env.world_size} at "
                f"{env.master_addr}:{env.master_port}. Were the ranks started twice, or RANK set for all alike?"
            )
        choice = _Interface(env, shared)
        shared.set(f"here/{env.rank}", "here")
        if env.rank == 0:
            _wait_for_all(shared, env, timeout)
            shared.set("all", "here")
        else:
            shared.wait(["all"], timeout)
        choice.make()
    except dist.DistError as error:
        raise RankEnvironmentError(
            f"rank {env.rank} of {env.world_size} waited {timeout.total_seconds():.0f} s for the others at "
            f"{env.master_addr}:{env.master_port}: {_first_line(error)}. The message of rank 0 names who is missing"
        ) from error
    finally:
        while _lobbies:
            _lobbies.pop().close()
    return shared


def _wait_for_all(shared: Any, env: RankEnvironment, timeout: timedelta) -> None:
    begun = time.monotonic()
    missing = list(range(env.world_size))
    told = False
    while True:
        missing = [rank for rank in missing if not shared.check([f"here/{rank}"])]
        if not missing:
            break
        waited = time.monotonic() - begun
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:16]))}{' …' * (len(missing) > 16)}"
        if waited > timeout.total_seconds():
            raise RankEnvironmentError(
                f"{who} of {env.world_size} did not come within {waited:.0f} s to {env.master_addr}. "
                "Did all ranks start, and can their nodes reach that address?"
            )
        if waited > PATIENCE_SECONDS and not told:
            told = True
            print(f"hpcaccel: rank 0 has waited {waited:.0f} s for {who}", file=sys.stderr, flush=True)
        time.sleep(0.01 if waited < 5 else 0.2)


# -- the interface -----------------------------------------------------------------------------------------------------


class _Interface:
    """Tells gloo which interface leads to the others, where it would find none by itself.

    It listens where the node's own name points, which on many systems is a loopback address that other nodes cannot
    reach. Other nodes take the interface that leads to rank 0's, and leave their address there, so that rank 0's node
    can take the one that leads to them. GLOO_SOCKET_IFNAME wins where it is set.
    """

    def __init__(self, env: RankEnvironment, store: Any) -> None:
        from hpcaccel.runtime.distributed import network_interfaces

        self._store = store
        self._address: str | None = None
        several_nodes = env.world_size > env.local_world_size
        self._wanted = (
            several_nodes
            and not os.environ.get("GLOO_SOCKET_IFNAME")
            and network_interfaces.name_is_loopback(socket.gethostname())
        )
        if several_nodes:
            self._address = network_interfaces.own_address_towards(env.master_addr)
            if self._address is not None and not network_interfaces.is_loopback(self._address):
                store.set("reached from", self._address)

    def make(self) -> None:
        """Once all ranks have checked in."""
        if not self._wanted or not self._store.check(["reached from"]):
            return
        from hpcaccel.runtime.distributed import network_interfaces

        address = self._address
        if address is None or network_interfaces.is_loopback(address):
            address = network_interfaces.own_address_towards(self._store.get("reached from").decode())
        name = None if address is None else network_interfaces.of_address(address)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name
