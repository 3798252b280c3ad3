"""Discovery of the store's port: rank 0's small service on one of several candidate ports, and the search for it. Also
the wait until a port that is already known accepts connections.

Protocol: one line per request and response, ``hpcaccel <name>`` → ``hpcaccel <name> <port>``. The response to any other
request, such as one with another group's name, is ``hpcaccel`` alone.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections.abc import Sequence

from hpcaccel.errors import RankEnvironmentError

__all__ = ["PORTS", "PortDiscovery", "candidate_ports", "find_store", "query", "wait_for_listener"]

FIRST_PORT = 20_000
PORTS = 12_000
"""Size of the range of candidate ports, which ends below Linux's ephemeral ports (from 32768)."""
CANDIDATES = 16
"""Number of candidate ports."""
STRIDE = 997
"""Distance between candidates; coprime to PORTS, so that all candidates differ."""

RESPONSE_SECONDS = 1.0
"""Timeout of each socket operation in a request."""
LONGEST_LINE = 512
"""Maximum length of a request or response, in bytes."""
BACKLOG = 4096
"""Maximum number of connections that wait to be accepted."""
WARNING_SECONDS = 60.0
"""Time after which a rank that has not found or reached rank 0 prints a warning."""
NAME_SECONDS = 60.0
"""How long a host name may be unresolvable: name services can lag at the start of a job."""
LONGEST_PAUSE_SECONDS = 2.0

REFUSED = "connection refused"
OTHER_SERVICE = "another service"
NO_RESPONSE = "no response from the node"
UNKNOWN_HOST = "unknown host name"


def candidate_ports(*, job: int, step: int = 0, restart: int = 0) -> tuple[int, ...]:
    """The ports for rank 0's service: the same in all tasks of a step, usually different in other steps and after
    a requeue."""
    first = job * 97 + step * 13 + restart * 7
    return tuple(FIRST_PORT + (first + number * STRIDE) % PORTS for number in range(CANDIDATES))


class PortDiscovery:
    """Rank 0's service. It responds with the store's port, in its own threads, until it is closed."""

    def __init__(self, name: str, listener: socket.socket, store_port: int) -> None:
        self._name = name
        self._listener = listener
        self._store_port = store_port
        threading.Thread(target=self._serve, name="hpcaccel-port-discovery", daemon=True).start()

    @classmethod
    def open(cls, name: str, ports: Sequence[int], store_port: int) -> PortDiscovery | None:
        """Start the service on the first free port of ``ports``. Returns None if none is free."""
        for port in ports:
            listener = _listen(port)
            if listener is not None:
                return cls(name, listener, store_port)
        return None

    def close(self) -> None:
        # shutdown() wakes a thread in accept(); close() does not.
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the thread is between two calls to accept()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # One thread per client: a client that sends nothing must not delay other clients.
            threading.Thread(target=self._respond, args=(connection,), daemon=True).start()

    def _respond(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(RESPONSE_SECONDS)
                if _read_line(connection) != f"hpcaccel {self._name}":
                    connection.sendall(b"hpcaccel\n")
                    return
                connection.sendall(f"hpcaccel {self._name} {self._store_port}\n".encode())
        except OSError:
            return  # the client tries again


def _listen(port: int) -> socket.socket | None:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=BACKLOG,
            dualstack_ipv6=both,
        )
    except OSError:
        return None


def find_store(
    name: str, host: str, ports: Sequence[int], *, rank: int, world_size: int, timeout_seconds: float
) -> tuple[str, int]:
    """Query the candidate ports in turn until rank 0's service responds.

    Args:
        name: the group's name.
        host: rank 0's node.
        rank, world_size: rank of this process and number of ranks, for messages.

    Returns:
        Address and port of the store.

    Raises:
        RankEnvironmentError: rank 0's service did not respond within the timeout, or the host name could not be
            resolved for ``NAME_SECONDS``.
    """
    started = time.monotonic()
    pause, warned = 0.05, False
    while True:
        found: dict[int, str] = {}
        for port in ports:
            response = query(name, host, port)
            if isinstance(response, tuple):
                return response
            found[port] = response
        waited = time.monotonic() - started
        text = f"rank {rank} of {world_size} has not found rank 0 on {host} after {waited:.0f} s: {_summary(found)}"
        is_unknown = set(found.values()) == {UNKNOWN_HOST}
        if waited > timeout_seconds or (is_unknown and waited > NAME_SECONDS):
            raise RankEnvironmentError(text)
        if waited > WARNING_SECONDS and not warned:
            warned = True
            print(f"hpcaccel: {text} Still waiting.", file=sys.stderr, flush=True)
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)


def wait_for_listener(host: str, port: int, *, rank: int, world_size: int, timeout_seconds: float) -> None:
    """Wait until connections to ``port`` are not refused. A TCPStore that is refused tries again only after 0.3 to
    0.7 s (measured with torch 2.13): longer than the rest of the rendezvous on one node.

    Args:
        rank, world_size: rank of this process and number of ranks, for messages.

    Raises:
        TimeoutError: connections were still refused after ``timeout_seconds``.
    """
    started, warned = time.monotonic(), False
    while (waited := time.monotonic() - started) < timeout_seconds:
        if waited > WARNING_SECONDS and not warned:
            warned = True
            text = f"rank {rank} of {world_size} has waited {waited:.0f} s for rank 0 at {host}:{port}. Still waiting."
            print(f"hpcaccel: {text}", file=sys.stderr, flush=True)
        try:
            socket.create_connection((host, port), timeout=RESPONSE_SECONDS).close()
        except ConnectionRefusedError:
            time.sleep(0.01 if waited < 5 else 0.2)
        except OSError:
            return  # TCPStore tries again, and reports the error
        else:
            return
    raise TimeoutError(f"connections were refused for {waited:.0f} s")


def _summary(found: dict[int, str]) -> str:
    by_result: dict[str, list[str]] = {}
    for port, result in found.items():
        by_result.setdefault(result, []).append(str(port))
    results = "; ".join(
        f"{result} (port{'s' * (len(ports) > 1)} {', '.join(ports)})" for result, ports in by_result.items()
    )
    return (
        f"{results}. Check that rank 0 has started, and that this node can reach it. Set MASTER_ADDR and MASTER_PORT "
        "to use another address."
    )


def query(name: str, host: str, port: int) -> tuple[str, int] | str:
    """Query the service at ``host`` and ``port``. Returns the address and port of the store of the group ``name``, or a
    message about what was found instead."""
    try:
        with socket.create_connection((host, port), timeout=RESPONSE_SECONDS) as connection:
            connection.sendall(f"hpcaccel {name}\n".encode())
            fields = _read_line(connection).split(" ")
            if len(fields) == 3 and fields[:2] == ["hpcaccel", name] and fields[2].isdigit():
                return str(connection.getpeername()[0]), int(fields[2])
            return OTHER_SERVICE
    except ConnectionRefusedError:
        return REFUSED
    except socket.gaierror:
        return UNKNOWN_HOST
    except TimeoutError:
        return f"{OTHER_SERVICE}, or {NO_RESPONSE}"
    except ConnectionError:
        return OTHER_SERVICE
    except OSError as error:
        return error.strerror or NO_RESPONSE


def _read_line(connection: socket.socket) -> str:
    """The next line from ``connection``, without the newline; empty if the line is too long or incomplete."""
    text = b""
    while not text.endswith(b"\n") and len(text) < LONGEST_LINE:
        piece = connection.recv(LONGEST_LINE - len(text))
        if not piece:
            break
        text += piece
    return text.decode(errors="replace").rstrip("\n") if text.endswith(b"\n") else ""
