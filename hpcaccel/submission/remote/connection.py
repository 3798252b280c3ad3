"""An SSH connection made by fabric, with the user's ssh config; host keys are always checked."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import select
import shutil
import signal
import socket
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fabric
from paramiko import Channel, HostKeys, MissingHostKeyPolicy, PKey, ProxyCommand, SSHClient
from paramiko.ssh_exception import (
    AuthenticationException,
    BadHostKeyException,
    NoValidConnectionsError,
    SSHException,
)

from hpcaccel.errors import ClusterError
from hpcaccel.submission.remote.login import Login
from hpcaccel.submission.remote.program_session import Connection, ConnectionLost, Session, Unreachable

__all__ = ["FabricConnection", "fingerprint"]

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # what goes wrong is said once, and in our words

CONNECT_SECONDS = 20
KEEPALIVE_SECONDS = 15
SILENT_MILLISECONDS = 60_000
"""How long a network may swallow what we send before the connection counts as broken."""
BROKEN = (SSHException, EOFError, OSError)
"""What paramiko raises when the connection has gone, whichever of its threads finds out first."""


class FabricConnection(Connection):
    """One connection; made when it is first used, and kept.

    Args:
        host: ``user@login``, ``login:2222``, or a ``Host`` of the user's ssh config.
        cluster: the profile's name, for messages.
    """

    def __init__(self, host: str, *, cluster: str) -> None:
        self._host = host
        self._cluster = cluster
        self._connection: Any = None

    def start(self, command: str) -> Session:
        channel = self._channel()
        try:
            channel.exec_command(command)
        except BROKEN as error:
            self.close()
            raise ConnectionLost(f"the connection to {self._host} broke: {error}") from None
        return ChannelSession(channel, self._host)

    def terminal(self, command: str) -> int:
        channel = self._channel()
        columns, lines = shutil.get_terminal_size()
        try:
            channel.get_pty(os.environ.get("TERM", "dumb"), columns, lines)
            channel.exec_command(command)
            _join_terminal(channel)
        except BROKEN as error:
            raise ConnectionLost(f"the connection to {self._host} broke: {error}") from None
        code = int(channel.recv_exit_status())
        if code < 0:
            raise ConnectionLost(f"the connection to {self._host} broke")
        return code

    def close(self) -> None:
        connection, self._connection = self._connection, None
        _close(connection)

    def _channel(self) -> Channel:
        if self._connection is None or not self._connection.is_connected:
            self.close()
            self._connection = self._open()
        try:
            channel: Channel = self._connection.transport.open_session(timeout=CONNECT_SECONDS)
        except BROKEN as error:
            self.close()
            raise ConnectionLost(f"the connection to {self._host} broke: {error}") from None
        return channel

    def _open(self) -> Any:
        config = fabric.Config(overrides={"authentication": {"strategy_class": Login}})
        connection = fabric.Connection(self._host, config=config)
        if connection.connect_timeout is None:
            connection.connect_timeout = CONNECT_SECONDS
        for one in _with_gateways(connection):
            _check_host_keys(one)
        try:
            with self._plain_words(connection):
                connection.open()
        except BaseException:
            _close(connection)
            raise
        _notice_silence(connection)
        return connection

    @contextmanager
    def _plain_words(self, connection: Any) -> Iterator[None]:
        where = f"{connection.host}:{connection.port}"
        try:
            yield
        except BadHostKeyException as error:
            raise ClusterError(_changed(error, connection)) from None
        except AuthenticationException as error:
            raise ClusterError(_refused(self._host, connection, str(error))) from None
        except socket.gaierror as error:
            raise ClusterError(
                f"unknown host {connection.host!r} (host of the profile {self._cluster!r}): {error.strerror}. "
                f"Check the name, the network and VPN, and ~/.ssh/config; try: ssh {self._host}"
            ) from None
        except (NoValidConnectionsError, ConnectionError, TimeoutError) as error:
            why = error.strerror or str(error) or "no answer"
            raise Unreachable(
                f"cannot reach {where} (profile {self._cluster!r}): {why}. Check the network, VPN and port; "
                f"try: ssh {self._host}"
            ) from None
        except (SSHException, EOFError) as error:
            raise Unreachable(f"no SSH connection to {where}: {error or 'it was closed at once'}") from None


class ChannelSession(Session):
    def __init__(self, channel: Channel, host: str) -> None:
        self._channel = channel
        self._host = host

    def write(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except BROKEN:
            raise self._lost() from None

    def close_input(self) -> None:
        try:
            self._channel.shutdown_write()
        except BROKEN:
            raise self._lost() from None

    def read(self, count: int) -> bytes:
        return bytes(self._channel.recv(count))

    def read_error(self, count: int) -> bytes:
        return bytes(self._channel.recv_stderr(count))

    def wait(self) -> int:
        code = int(self._channel.recv_exit_status())
        if code < 0:  # no status came: the connection ended first, or the program was killed
            raise self._lost()
        return code

    def close(self) -> None:
        with suppress(*BROKEN):  # a connection that is broken needs no word of parting
            self._channel.close()

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self._host} broke")


def fingerprint(key: PKey) -> str:
    """As ``ssh-keygen -l`` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")


class _Refuse(MissingHostKeyPolicy):  # type: ignore[misc]
    """An unknown key is for a person to judge, who may compare it with what the site publishes."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:
        there = self._connection.original_host
        port = f"-p {self._connection.port} " if hostname.startswith("[") else ""
        raise ClusterError(
            f"the host key of {hostname} is not known yet: {key.get_name()} {fingerprint(key)}. Compare it with what "
            f"the site publishes; then take it on by logging in once (ssh {port}{there}), which asks the same question"
        )


def _check_host_keys(connection: Any) -> None:
    client, config = connection.client, connection.ssh_config
    client.set_missing_host_key_policy(_Refuse(connection))
    known = config.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2").split()
    known += config.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2").split()
    for name in known:
        file = Path(os.path.expanduser(name))
        if file.is_file():
            client.load_system_host_keys(str(file))
    if (alias := config.get("hostkeyalias")) is not None:
        _answer_for(client, alias, connection)


def _known_name(connection: Any) -> str:
    """As known_hosts writes it."""
    return str(connection.host) if connection.port == 22 else f"[{connection.host}]:{connection.port}"


def _answer_for(client: SSHClient, alias: str, connection: Any) -> None:
    """The keys that are known under an alias (``HostKeyAlias``) are those of this host."""
    name = _known_name(connection)
    keys: HostKeys = client.get_host_keys()
    known = client._system_host_keys.lookup(alias)
    for kind, key in ({} if known is None else dict(known)).items():
        keys.add(name, kind, key)


def _with_gateways(connection: Any) -> Iterator[Any]:
    """A connection and the jump hosts in front of it."""
    while isinstance(connection, fabric.Connection):
        yield connection
        connection = connection.gateway


def _close(connection: Any) -> None:
    for one in _with_gateways(connection):
        transport = one.client.get_transport()
        sock = None if transport is None else transport.sock
        one.client.close()
        if isinstance(sock, ProxyCommand):
            # Its thread ends the process once more: if Popen.kill() had reaped it, that would be none, or another one.
            if sock.process.returncode is None:
                os.kill(sock.process.pid, signal.SIGKILL)
            transport.join(CONNECT_SECONDS)
            with sock.process:
                pass  # paramiko leaves pipes and process to chance


def _notice_silence(connection: Any) -> None:
    for one in _with_gateways(connection):
        one.transport.set_keepalive(KEEPALIVE_SECONDS)
        sock = one.transport.sock
        if isinstance(sock, socket.socket) and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MILLISECONDS)


def _changed(error: BadHostKeyException, connection: Any) -> str:
    one = next(one for one in _with_gateways(connection) if one.host == error.hostname)
    name = _known_name(one)
    return (
        f"THE HOST KEY OF {name} HAS CHANGED. Somebody may be listening in, or the host was set up anew. "
        f"Known: {error.expected_key.get_name()} {fingerprint(error.expected_key)}; it shows: {error.key.get_name()} "
        f"{fingerprint(error.key)}. Nothing was sent. Ask the site; only if it says that the new key is right, remove "
        f"the old one (ssh-keygen -R '{name}') and log in once (ssh {one.original_host})"
    )


def _refused(host: str, connection: Any, why: str) -> str:
    return (
        f"{connection.host} refuses the login of {connection.user!r}: {why}. Is that your user name there (host: "
        f"user@{connection.host})? Is your public key installed (ssh-copy-id {host}), and the right one chosen "
        f"(IdentityFile in ~/.ssh/config, ssh-add -l)? Try: ssh {host}"
    )


# -- a shell on the other side ----------------------------------------------------------------------------------------


def _join_terminal(channel: Channel) -> None:
    """Hand keys to the other side and its output to this terminal, until it ends."""
    with _raw_terminal(channel.resize_pty):
        inputs: list[Any] = [channel, sys.stdin.fileno()]
        while True:
            ready, _, _ = select.select(inputs, [], [])
            if channel in ready:
                data = channel.recv(1 << 15)
                if not data:
                    return
                os.write(sys.stdout.fileno(), data)
            if sys.stdin.fileno() in ready:
                typed = os.read(sys.stdin.fileno(), 1 << 12)
                if typed:
                    channel.sendall(typed)
                else:
                    channel.shutdown_write()
                    inputs.pop()


@contextmanager
def _raw_terminal(resize: Callable[[int, int], None]) -> Iterator[None]:
    """Keys pass as they are typed, Ctrl-C too; nothing to do where stdin is no terminal."""
    if not sys.stdin.isatty() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    handler = signal.signal(signal.SIGWINCH, lambda *_: resize(*shutil.get_terminal_size()))
    try:
        tty.setraw(sys.stdin.fileno())
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, handler)
