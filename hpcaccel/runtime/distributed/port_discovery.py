"""A little service at rank 0 that tells those who know the group's name at which port the group's store is.

One line asks, one line answers: ``hpcaccel <name>`` → ``hpcaccel <name> <port>``, or ``hpcaccel`` alone for anybody
else's name.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

__all__ = ["NOTHING", "OTHER", "UNKNOWN_NAME", "Lobby", "ask"]

SECONDS = 1.0
"""Within which a line comes or does not; a service that says nothing at all costs so much each time it is tried."""
LONGEST_LINE = 512
WAITING_CONNECTIONS = 4096

NOTHING = "nobody listens"
OTHER = "something else listens"
UNREACHABLE = "no answer from the node"
UNKNOWN_NAME = "the address is not known here"


class Lobby:
    """Answers in a thread of its own until it is closed."""

    def __init__(self, name: str, listener: socket.socket, store_port: int) -> None:
        self._name = name
        self._listener = listener
        self._store_port = store_port
        threading.Thread(target=self._serve, name="hpcaccel-lobby", daemon=True).start()

    @classmethod
    def open(cls, name: str, ports: Sequence[int], store_port: int) -> Lobby | None:
        """On the first port that is free; None where none is."""
        for port in ports:
            listener = _listen(port)
            if listener is not None:
                return cls(name, listener, store_port)
        return None

    def close(self) -> None:
        # A thread that waits in accept() is woken by shutdown, not by close.
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the thread is just between two calls of accept, and finds it closed
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # One that says nothing must not keep the others waiting.
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(SECONDS)
                if _read_line(connection) != f"hpcaccel {self._name}":
                    connection.sendall(b"hpcaccel\n")
                    return
                connection.sendall(f"hpcaccel {self._name} {self._store_port}\n".encode())
        except OSError:
            return  # it asks again


def _listen(port: int) -> socket.socket | None:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=WAITING_CONNECTIONS,
            dualstack_ipv6=both,
        )
    except OSError:
        return None


def ask(name: str, host: str, port: int) -> tuple[str, int] | str:
    """The address and the port of the store; or what was found instead."""
    try:
        with socket.create_connection((host, port), timeout=SECONDS) as connection:
            connection.sendall(f"hpcaccel {name}\n".encode())
            words = _read_line(connection).split(" ")
            if len(words) == 3 and words[:2] == ["hpcaccel", name] and words[2].isdigit():
                return str(connection.getpeername()[0]), int(words[2])
            return OTHER
    except ConnectionRefusedError:
        return NOTHING
    except socket.gaierror:
        return UNKNOWN_NAME
    except TimeoutError:
        return f"{OTHER}, or {UNREACHABLE}"
    except ConnectionError:
        return OTHER
    except OSError as error:
        return error.strerror or UNREACHABLE


def _read_line(connection: socket.socket) -> str:
    """Up to the end of the line; nothing where it is too long or never ends."""
    text = b""
    while not text.endswith(b"\n") and len(text) < LONGEST_LINE:
        piece = connection.recv(LONGEST_LINE - len(text))
        if not piece:
            break
        text += piece
    return text.decode(errors="replace").rstrip("\n") if text.endswith(b"\n") else ""
