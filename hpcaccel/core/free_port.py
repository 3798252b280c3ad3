"""A TCP port that is free on this host."""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["free_port"]

PORT_TRIES = 100


def free_port() -> int:
    """A TCP port that is free on this host at this moment.

    The ranks bind the port only after they have imported torch. The kernel takes ports for outgoing connections from
    the ephemeral range (ip(7)), so a port outside of that range is chosen if possible, at random to avoid collisions.
    """
    first, last = _ports_of_connections()
    dice = random.SystemRandom()
    for _ in range(PORT_TRIES):
        port = dice.randrange(10_000, 1 << 16)
        if not first <= port <= last and _is_free(port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _ports_of_connections() -> tuple[int, int]:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return 32_768, 60_999
    return int(first), int(last)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
