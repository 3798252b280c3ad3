"""An SSH connection made by fabric, with the user's ssh config; host keys are always checked."""

from __future__ import annotations

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
from typing import Any

import fabric
from paramiko import Channel, ProxyCommand
from paramiko.ssh_exception import (
    AuthenticationException,
    BadHostKeyException,
    NoValidConnectionsError,
    SSHException,
)

from hpcaccel.errors import ClusterError
from hpcaccel.submission.remote.login import Login, changed_host_key, check_host_keys, refused_login, with_gateways
from hpcaccel.submission.remote.protocol import Connection, ConnectionLost, ProgramSession, Unreachable

__all__ = ["FabricConnection"]

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # errors are reported once, by this module

CONNECT_SECONDS = 20
KEEPALIVE_SECONDS = 15
SILENT_MILLISECONDS = 60_000
"""Time for which sent data may stay unacknowledged before the connection counts as broken."""
BROKEN = (SSHException, EOFError, OSError)
"""Exceptions that paramiko raises for a broken connection, depending on the thread that detects it first."""


class FabricConnection(Connection):
    """A connection that is opened at its first use and kept open. Several threads can use it.

    Args:
        host: ``user@login``, ``login:2222``, or a ``Host`` of the user's ssh config.
        cluster: the profile's name, for messages.
    """

    def __init__(self, host: str, *, cluster: str) -> None:
        self._host = host
        self._cluster = cluster
        self._connection: Any = None
        self._opening = threading.Lock()

    def start(self, command: str) -> ProgramSession:
        channel = self._channel()
        try:
            channel.exec_command(command)
        except BROKEN as error:
            self.close()
            raise ConnectionLost(f"the connection to {self._host} was lost: {error}") from None
        return ChannelSession(channel, self._host)

    def terminal(self, command: str) -> int:
        channel = self._channel()
        columns, lines = shutil.get_terminal_size()
        try:
            channel.get_pty(os.environ.get("TERM", "dumb"), columns, lines)
            channel.exec_command(command)
            _join_terminal(channel)
        except BROKEN as error:
            raise ConnectionLost(f"the connection to {self._host} was lost: {error}") from None
        code = int(channel.recv_exit_status())
        if code < 0:
            raise _no_exit_status(self._host)
        return code

    def close(self) -> None:
        connection, self._connection = self._connection, None
        _close(connection)

    def _channel(self) -> Channel:
        with self._opening:
            if self._connection is None or not self._connection.is_connected:
                self.close()
                self._connection = self._open()
            connection = self._connection
        try:
            channel: Channel = connection.transport.open_session(timeout=CONNECT_SECONDS)
        except BROKEN as error:
            self.close()
            raise ConnectionLost(f"the connection to {self._host} was lost: {error}") from None
        return channel

    def _open(self) -> Any:
        config = fabric.Config(overrides={"authentication": {"strategy_class": Login}})
        connection = fabric.Connection(self._host, config=config)
        if connection.connect_timeout is None:
            connection.connect_timeout = CONNECT_SECONDS
        for one in with_gateways(connection):
            check_host_keys(one)
        try:
            with self._cluster_errors(connection):
                connection.open()
        except BaseException:
            _close(connection)
            raise
        _notice_silence(connection)
        return connection

    @contextmanager
    def _cluster_errors(self, connection: Any) -> Iterator[None]:
        where = f"{connection.host}:{connection.port}"
        try:
            yield
        except BadHostKeyException as error:
            raise ClusterError(changed_host_key(error, connection)) from None
        except AuthenticationException as error:
            raise ClusterError(refused_login(self._host, connection, str(error))) from None
        except socket.gaierror as error:
            raise ClusterError(
                f"unknown host {connection.host!r} (host in profile {self._cluster!r}): {error.strerror}. "
                f"Check the name, the network and VPN, and ~/.ssh/config; try: ssh {self._host}"
            ) from None
        except (NoValidConnectionsError, ConnectionError, TimeoutError) as error:
            why = error.strerror or str(error) or "no response"
            raise Unreachable(
                f"cannot reach {where} (profile {self._cluster!r}): {why}. Check the network, VPN and port; "
                f"try: ssh {self._host}"
            ) from None
        except (SSHException, EOFError) as error:
            raise Unreachable(
                f"SSH connection to {where} failed: {error or 'the host closed it'}. For details, try: ssh {self._host}"
            ) from None


class ChannelSession(ProgramSession):
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
        if code < 0:
            raise _no_exit_status(self._host)
        return code

    def close(self) -> None:
        with suppress(*BROKEN):  # the connection may be broken already
            self._channel.close()

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self._host} was lost, or the program there has ended")


def _no_exit_status(host: str) -> ConnectionLost:
    return ConnectionLost(
        f"the program on {host} ended without an exit status: the connection was lost, or the program was killed"
    )


def _close(connection: Any) -> None:
    for one in with_gateways(connection):
        transport = one.client.get_transport()
        sock = None if transport is None else transport.sock
        one.client.close()
        if isinstance(sock, ProxyCommand):
            # Not Popen.kill(), which may reap the process: paramiko's thread also kills this pid, which could by then
            # belong to another process.
            if sock.process.returncode is None:
                os.kill(sock.process.pid, signal.SIGKILL)
            transport.join(CONNECT_SECONDS)
            with sock.process:
                pass  # closes the pipes and reaps the process


def _notice_silence(connection: Any) -> None:
    for one in with_gateways(connection):
        one.transport.set_keepalive(KEEPALIVE_SECONDS)
        sock = one.transport.sock
        if isinstance(sock, socket.socket) and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MILLISECONDS)


def _join_terminal(channel: Channel) -> None:
    """Forward keys to the remote program, and its output to this terminal, until the program ends."""
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
    """If stdin is a terminal, switch it to raw mode in the block, so that all keys, even Ctrl-C, are forwarded."""
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
