"""Tests of the connection between warm parents and the supervisor over TCP."""

from __future__ import annotations

import json
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hpcaccel.core.durable_files import json_line
from hpcaccel.node.warm.warm_channel import WarmConnection, WarmListener, connect


@pytest.fixture
def listener() -> Iterator[WarmListener]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # as in a supervisor
    one = WarmListener("localhost", ranks=2)
    yield one
    one.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def connected(listener: WarmListener, address: dict[str, Any]) -> tuple[socket.socket | None, list[WarmConnection]]:
    """The parent's socket and what the supervisor has accepted."""
    sockets: list[socket.socket | None] = []
    thread = threading.Thread(target=lambda: sockets.append(connect(address, rank=1, host="n1")))
    thread.start()
    accepted: list[WarmConnection] = []
    while thread.is_alive():
        accepted += listener.accepted()
        time.sleep(0.01)
    accepted += listener.accepted()
    return sockets[0], accepted


def test_parent_and_supervisor_with_the_same_token_are_connected(listener: WarmListener) -> None:
    parent, (connection,) = connected(listener, listener.address)
    assert parent is not None
    assert (connection.rank, connection.host) == (1, "n1")
    parent.close()
    connection.close()


def test_supervisor_without_the_token_is_refused(listener: WarmListener) -> None:
    assert connected(listener, {**listener.address, "token": "0" * 64}) == (None, [])


def test_parent_without_the_token_is_refused(listener: WarmListener) -> None:
    with socket.create_connection(("localhost", listener.address["port"]), 60) as channel:
        channel.sendall(json_line({"nonce": "1"}) + json_line({"rank": 0, "host": "n1", "proof": "0" * 64}))
        accepted: list[WarmConnection] = []
        while not select.select([channel], [], [], 0)[0]:
            accepted += listener.accepted()
        time.sleep(0.1)
        accepted += listener.accepted()
        assert accepted == []
        lines = channel.makefile("rb").readlines()
        assert [sorted(json.loads(line)) for line in lines] == [["nonce", "proof"]]


def test_parent_without_a_supervisor_goes_on_alone(listener: WarmListener) -> None:
    listener.close()
    assert connect(listener.address, rank=0, host="n1") is None
    assert connect({**listener.address, "host": "no.such.host.invalid"}, rank=0, host="n1") is None
