"""Network interfaces of this node: which one leads to another node."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

__all__ = ["is_loopback", "name_is_loopback", "of_address", "own_address_towards"]

SIOCGIFADDR = 0x8915
"""Linux's request for an interface's IPv4 address: netdevice(7)."""
ANY_PORT = 9
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def name_is_loopback(host: str) -> bool:
    """Whether a name points to this node from the inside only, or nowhere."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return True
    return all(is_loopback(str(entry[4][0])) for entry in found)


def is_loopback(address: str) -> bool:
    """Whether other nodes cannot reach this address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address_towards(host: str) -> str | None:
    """This node's address as ``host`` would see it; None where the way there is not known. Nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as looking:
            looking.connect(address)
            return str(looking.getsockname()[0])
    except OSError:
        return None


def of_address(address: str) -> str | None:
    """The interface with this address, or None."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    for _, name in socket.if_nameindex():
        if wanted in _addresses(name):
            return name
    # Every address of 127.0.0.0/8 is the loopback interface's, of which it names only one.
    return "lo" if wanted.is_loopback else None


def _addresses(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            found.append(ipaddress.IPv4Address(answer[20:24]))
        except OSError:
            pass  # it has none
    if IPV6_ADDRESSES.exists():
        for line in IPV6_ADDRESSES.read_text().splitlines():
            words = line.split()
            if words[5] == name:
                found.append(ipaddress.IPv6Address(int(words[0], 16)))
    return found
