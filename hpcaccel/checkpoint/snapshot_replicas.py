"""Replicas: each rank sends its part of a snapshot to a rank on the next node, whose memory holds it as well.

The parts are sent over TCP, by the thread that publishes them, so that training does not wait. Sender and receiver
prove to each other, with a secret that rank 0 draws and shares through the process group, that they belong to the same
training. A replica is a part like any other in the receiver's folder, and is published in the same way, so after the
loss of a node the ranks of the next attempt find it there.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcaccel.checkpoint.part_files import PartFiles
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.snapshot_parts import SnapshotKey, SnapshotRecord
from hpcaccel.core.durable_files import json_line
from hpcaccel.errors import CheckpointError

__all__ = ["SnapshotReplicas"]

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 60.0
"""How long one read or write may take."""
CONNECT_SECONDS = 5.0
HEADER_BYTES = 4096
NONCE_BYTES = 32
MAC_BYTES = 32
ACCEPTED = b"k"


class SnapshotReplicas:
    """Sends this rank's parts to its partner, and receives those of others. The constructor is collective.

    Args:
        folder: this node's folder of the run; its name is the node's.
        attempt: number of the run's attempt.

    Raises:
        CheckpointError: on all ranks, if they are all on one node, or a rank cannot open a port.
    """

    def __init__(self, ranks: CheckpointRanks, folder: Path, *, attempt: int) -> None:
        self._rank = ranks.rank
        self._folder = folder
        self._attempt = attempt
        self._received: dict[int, PartFiles] = {}
        self._connection: socket.socket | None = None
        self._server: socket.socket | None = None
        what = "no replicas of snapshots are kept on other nodes"
        found: tuple[list[tuple[str, list[str], int]], bytes] = ranks.reduce(
            what, self._listen, lambda places: (places, secrets.token_bytes(NONCE_BYTES))
        )
        places, self._secret = found
        partners = partners_of([node for node, _, _ in places])
        if partners is None:
            self.close()
            raise CheckpointError(f"{what}: the ranks are all on one node")
        _, self._hosts, self._port = places[partners[self._rank]]
        threading.Thread(target=self._accept, name="replica-receiver", daemon=True).start()

    def _listen(self) -> tuple[str, list[str], int]:
        """Open a port. Returns this node's name, its addresses and the port."""
        try:
            self._server = socket.create_server(("", 0), backlog=64)
        except OSError as error:
            raise CheckpointError(f"cannot open a port: {error.strerror or error}") from None
        name = socket.gethostname()
        hosts = [os.environ.get("MASTER_ADDR", "")] if self._rank == 0 else []
        return self._folder.name, [*filter(None, hosts), name], self._server.getsockname()[1]

    # -- sending

    def send(self, key: SnapshotKey, record: SnapshotRecord, content: memoryview) -> None:
        """Send a part, and return when the partner has published it.

        Raises:
            OSError: the partner cannot be reached or has not accepted the part.
        """
        try:
            connection = self._connection or self._connect()
            text = record.to_bytes()
            header = {"key": list(key), "rank": self._rank, "record": len(text), "bytes": len(content)}
            connection.sendall(json_line(header).ljust(HEADER_BYTES))
            connection.sendall(text)
            connection.sendall(content)
            if connection.recv(1) != ACCEPTED:
                raise ConnectionError("the rank on the next node has not accepted the replica")
        except BaseException:
            self._disconnect()
            raise

    def _connect(self) -> socket.socket:
        problem: OSError = ConnectionError("no address of the next node is known")
        for host in self._hosts:
            try:
                connection = socket.create_connection((host, self._port), timeout=CONNECT_SECONDS)
            except OSError as error:
                problem = error
                continue
            connection.settimeout(TIMEOUT_SECONDS)
            self._connection = connection
            connection.sendall(self._mac(b"sender", _receive(connection, NONCE_BYTES)) + (own := _nonce()))
            if hmac.compare_digest(_receive(connection, MAC_BYTES), self._mac(b"receiver", own)):
                return connection
            self._disconnect()
            problem = ConnectionError(f"{host}:{self._port} does not belong to this training")
        raise problem

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _mac(self, role: bytes, nonce: bytes) -> bytes:
        return hmac.digest(self._secret, role + nonce, hashlib.sha256)

    # -- receiving

    def _accept(self) -> None:
        server = self._server
        while server is not None:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), name="replica-receiver", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Receive the parts of one rank until it closes the connection."""
        with connection:
            try:
                connection.settimeout(TIMEOUT_SECONDS)
                connection.sendall(own := _nonce())
                answer = _receive(connection, MAC_BYTES + NONCE_BYTES)
                if not hmac.compare_digest(answer[:MAC_BYTES], self._mac(b"sender", own)):
                    return
                connection.sendall(self._mac(b"receiver", answer[MAC_BYTES:]))
                while True:
                    connection.settimeout(None)  # until the next snapshot
                    header = json.loads(_receive(connection, HEADER_BYTES))
                    connection.settimeout(TIMEOUT_SECONDS)
                    self._receive_part(connection, header)
                    connection.sendall(ACCEPTED)
            except EOFError:
                pass  # the rank has ended
            except (OSError, ValueError, CheckpointError) as error:
                log.warning("a replica of a snapshot was not received: %s", error)

    def _receive_part(self, connection: socket.socket, header: dict[str, Any]) -> None:
        rank, size = int(header["rank"]), int(header["bytes"])
        files = self._received.setdefault(
            rank, PartFiles(self._folder, f"replica_{rank:05d}.{self._attempt}", rank=rank)
        )
        record = SnapshotRecord.from_bytes(_receive(connection, int(header["record"])), self._folder)
        file = files.free(size)
        _receive_into(connection, file.memory.view[:size])
        attempt, number, step = header["key"]
        files.publish(file, SnapshotKey(attempt, number, step), record)

    def close(self) -> None:
        """Close the port and the connection."""
        self._disconnect()
        server, self._server = self._server, None
        if server is not None:
            server.close()


def partners_of(nodes: Sequence[str]) -> list[int] | None:
    """For each rank, the rank on the next node to which it sends its parts; None if there is one node only.

    Args:
        nodes: the node of each rank.
    """
    order = list(dict.fromkeys(nodes))
    if len(order) < 2:
        return None
    local = {name: [rank for rank, node in enumerate(nodes) if node == name] for name in order}
    found = []
    for rank, node in enumerate(nodes):
        there = local[order[(order.index(node) + 1) % len(order)]]
        found.append(there[local[node].index(rank) % len(there)])
    return found


def _nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def _receive(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    _receive_into(connection, memoryview(content))
    return bytes(content)


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = connection.recv_into(target[done:])
        if count == 0:
            raise EOFError
        done += count
