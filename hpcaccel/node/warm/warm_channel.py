"""The connection between a warm parent and the supervisor: JSON lines, with orders one way and reports the other.

On the local backend it is a socket pair that the parent inherits. Under Slurm the parent connects to the supervisor.
Each side first proves that it has the step's token (HMAC over the other side's random number); the token itself is
passed in the step's environment and never sent.

Orders: ``start`` (``attempt``, ``arguments``, ``environment``, ``unset``, ``log``, ``forget``: whether stop signals
from before do not concern the rank), ``kill``, ``end``, and on the local backend ``signal`` (``number``). Reports:
``started`` (``pid``; ``problem``: why the rank was not forked; empty if it was, and for the first); ``warm``
(``problem``: why ranks are still not forked; empty if they are); ``bound`` (the rank uses MPI, so that the next one
needs a new step); ``ended`` (``code``: negative for a signal; ``memory``: whether the kernel has killed processes of
the node for lack of memory meanwhile).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from hpcaccel.core.durable_files import LineSplitter, json_line

__all__ = ["WarmConnection", "WarmListener", "connect", "wake_at_input"]

TIMEOUT_SECONDS = 20.0


def _proof(token: str, side: str, nonce: str) -> str:
    return hmac.new(token.encode(), f"{side} {nonce}".encode(), hashlib.sha256).hexdigest()


# -- the parent's end --------------------------------------------------------------------------------------------------


def connect(address: Mapping[str, Any], *, rank: int, host: str) -> socket.socket | None:
    """The parent's socket to the supervisor; None if the supervisor cannot be reached or lacks the token."""
    if "descriptor" in address:
        return socket.socket(fileno=address["descriptor"])
    try:
        channel = socket.create_connection((address["host"], address["port"]), TIMEOUT_SECONDS)
    except OSError:
        return None
    try:
        if _is_accepted(channel, address["token"], rank=rank, host=host):
            channel.settimeout(None)
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return channel
    except (OSError, ValueError, KeyError):
        pass
    channel.close()
    return None


def _is_accepted(channel: socket.socket, token: str, *, rank: int, host: str) -> bool:
    """Greet the supervisor. Returns whether both sides have proved that they have the token."""
    with channel.makefile("rb") as lines:
        nonce = os.urandom(16).hex()
        channel.sendall(json_line({"nonce": nonce}))
        reply = json.loads(lines.readline())
        if not hmac.compare_digest(reply["proof"], _proof(token, "supervisor", nonce)):
            return False
        proof = _proof(token, "parent", reply["nonce"])
        channel.sendall(json_line({"rank": rank, "host": host, "proof": proof}))
        return bool(json.loads(lines.readline()).get("accepted"))


# -- the supervisor's end ----------------------------------------------------------------------------------------------


def wake_at_input(channel: socket.socket | int) -> None:
    """Have the kernel send SIGCHLD to this process when a socket or pipe becomes readable, as at the end of a child,
    see fcntl(2). The supervisor waits for this signal."""
    fcntl.fcntl(channel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(channel, 10, signal.SIGCHLD)  # F_SETSIG, which Python does not name
    fcntl.fcntl(channel, fcntl.F_SETFL, fcntl.fcntl(channel, fcntl.F_GETFL) | os.O_ASYNC)


class WarmConnection:
    """A connected warm parent and what it has reported."""

    def __init__(self, channel: socket.socket, *, rank: int, host: str) -> None:
        self.rank, self.host = rank, host
        self.pid: int | None = None
        """Process ID of the rank, on its own host."""
        self.code: int | None = None
        """How the rank of the current attempt ended; None while it runs. Negative: the signal that ended it."""
        self.memory = False
        """Whether processes of the node were killed for lack of memory before the rank ended."""
        self.warm = False
        """Whether the parent has imported the rank's modules."""
        self.problem = ""
        """Why the parent has not forked its rank, or will not fork the next one, all the same; empty if it does."""
        self.bound = False
        """Whether no other rank can follow in the same step."""
        self.closed = False
        self.attempt = 0
        self._lines = LineSplitter()
        self._channel = channel
        self._input = select.poll()  # select.select is limited to 1,024 files
        self._input.register(channel, select.POLLIN)
        channel.settimeout(TIMEOUT_SECONDS)
        wake_at_input(channel)

    def start(self, attempt: int, order: Mapping[str, Any]) -> None:
        """Order the start of the next attempt's rank."""
        self.attempt, self.pid, self.code, self.memory = attempt, None, None, False
        self.send({"do": "start", "attempt": attempt, **order})

    def send(self, order: Mapping[str, Any]) -> None:
        """Send an order. A connection that fails counts as closed."""
        try:
            self._channel.sendall(json_line(order))
        except OSError:
            self.closed = True

    def receive(self) -> None:
        """Receive reports, without waiting."""
        while not self.closed and self._input.poll(0):
            try:
                data = self._channel.recv(1 << 16)
            except OSError:
                data = b""
            self.closed = not data
            for line in self._lines.feed(data):
                self._note(json.loads(line))

    def _note(self, report: Mapping[str, Any]) -> None:
        if self.attempt not in (0, report["attempt"]):
            return  # about an attempt that has ended
        self.attempt = report["attempt"]
        match report["event"]:
            case "started":
                self.pid, self.problem = report["pid"], report["problem"]
            case "warm":
                self.warm, self.problem = True, report["problem"]
            case "bound":
                self.bound = True
            case "ended":
                self.code, self.memory = report["code"], report["memory"]

    def close(self) -> None:
        self.closed = True
        self._channel.close()


class WarmListener:
    """Accepts the warm parents of a step.

    Args:
        host: this node's name, under which the other nodes reach it.
    """

    def __init__(self, host: str, *, ranks: int) -> None:
        self._ranks = ranks
        self._token = os.urandom(32).hex()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=max(128, ranks))
        self._server.setblocking(False)
        wake_at_input(self._server)
        self.address = {"host": host, "port": self._server.getsockname()[1], "token": self._token}
        """The value of ``WARM`` (``node.rank``) for the step's tasks."""
        self._greeted: list[tuple[socket.socket, LineSplitter, str, float]] = []
        """Connections whose parent has not yet proved that it has the token, with this side's random number and the
        time by which it must have done so."""

    def accepted(self) -> list[WarmConnection]:
        """The parents that have proved since the last call that they have the token. Does not wait."""
        with contextlib.suppress(BlockingIOError):
            while True:
                channel, _ = self._server.accept()
                channel.setblocking(False)
                wake_at_input(channel)
                self._greeted.append(
                    (channel, LineSplitter(), os.urandom(16).hex(), time.monotonic() + TIMEOUT_SECONDS)
                )
        found = []
        for greeted in list(self._greeted):
            result = self._greet(*greeted)
            if result is not None:
                self._greeted.remove(greeted)
            if isinstance(result, WarmConnection):
                found.append(result)
        return found

    def _greet(
        self, channel: socket.socket, lines: LineSplitter, nonce: str, until: float
    ) -> WarmConnection | bool | None:
        """Continue the greeting. Returns the connection at its end, False if it failed, None if more is to come."""
        try:
            data = channel.recv(1 << 12)
            for line in lines.feed(data):
                said = json.loads(line)
                if "proof" not in said:
                    proof = _proof(self._token, "supervisor", said["nonce"])
                    channel.sendall(json_line({"proof": proof, "nonce": nonce}))
                elif hmac.compare_digest(said["proof"], _proof(self._token, "parent", nonce)):
                    channel.sendall(json_line({"accepted": True}))
                    return WarmConnection(channel, rank=int(said["rank"]), host=str(said["host"]))
                else:
                    data = b""
        except BlockingIOError:
            if time.monotonic() < until:
                return None
            data = b""
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            data = b""
        if not data:
            channel.close()
            return False
        return None

    def close(self) -> None:
        for channel, *_ in self._greeted:
            channel.close()
        self._server.close()
