"""``hpcaccel serve``: opens the port on 127.0.0.1 or the Unix socket, and answers until it is interrupted."""

from __future__ import annotations

import ctypes
import errno
import getpass
import os
import secrets
import signal
import socket as sockets
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlencode

import uvicorn

from hpcaccel.errors import UserError
from hpcaccel.service.app import create_app
from hpcaccel.service.client_connection import TOKEN_VARIABLE
from hpcaccel.service.service_settings import ServiceSettings, normalized_base_path

__all__ = ["serve"]

SILENT_MILLISECONDS = 60_000
"""The kernel closes a connection whose client has acknowledged nothing for this long."""
BACKLOG = 2048
MOST_CONNECTIONS = 2000
"""More connections at once get a 503 response."""
_M_ARENA_MAX = -8  # malloc.h


def serve(
    *,
    port: int = 0,
    socket: Path | None = None,
    base_path: str = "",
    hosts: Sequence[str] = (),
    runs_dir: Path | None = None,
    demo: bool = False,
    started: Callable[[str, list[str]], None],
) -> None:
    """Serve until Ctrl-C.

    Args:
        port: the port on 127.0.0.1; 0 for a free one.
        socket: path of a Unix socket, in place of a port.
        hosts: names of a proxy that Host and Origin may contain.
        demo: whether ``runs_dir`` has recorded runs. The page shows this, and nothing can be changed.
        started: called with the link, and with lines that say how to open it from another machine.

    Raises:
        UserError: the port or the socket is in use, or the base path is not a path.
    """
    _share_heaps()
    base = normalized_base_path(base_path)
    listening = _on_port(port) if socket is None else _on_socket(socket)
    try:
        token = os.environ.get(TOKEN_VARIABLE) or (secrets.token_urlsafe(32) if socket is None else None)
        settings = ServiceSettings(
            token=token,
            port=listening.getsockname()[1] if socket is None else 0,
            socket=None if socket is None else socket.absolute(),
            base_path=base,
            hosts=tuple(hosts),
            runs_dir=runs_dir,
            demo=demo,
        )
        server = uvicorn.Server(_config(settings))
        listening.listen(BACKLOG)
        started(link(settings), ways_from_elsewhere(settings))
        signal.signal(signal.SIGTERM, _end)  # uvicorn stops, and raises the signal again
        with suppress(KeyboardInterrupt, SystemExit):
            server.run(sockets=[listening])
    finally:
        listening.close()
        if socket is not None:
            socket.unlink(missing_ok=True)


def _share_heaps() -> None:
    """Let all threads allocate from two heaps. By default glibc gives each thread one of its own, up to 8 per CPU, and
    returns to the system only what is free at a heap's end: see mallopt(3), M_ARENA_MAX."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def _end(*_: object) -> None:
    raise SystemExit(0)


def _config(settings: ServiceSettings, *, page: bool | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(settings, page=page),
        log_level="warning",
        access_log=False,  # links contain the token
        proxy_headers=False,
        server_header=False,
        ws="none",
        backlog=BACKLOG,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
    )


def link(settings: ServiceSettings) -> str:
    """The address to open in a browser, with the token."""
    query = "" if settings.token is None else f"?{urlencode({'token': settings.token})}"
    if settings.socket is not None:
        return f"http://localhost:8000{settings.base_path}/{query}"
    return f"{settings.url}/{query}"


def ways_from_elsewhere(settings: ServiceSettings) -> list[str]:
    """Commands for the user's own computer, if the service runs on another one."""
    login = f"{getpass.getuser()}@{sockets.gethostname()}"
    if settings.socket is not None:
        return [f"ssh -L 8000:{settings.socket} {login}"]
    return [f"ssh -L {settings.port}:127.0.0.1:{settings.port} {login}"] if "SSH_CONNECTION" in os.environ else []


def _on_port(port: int) -> sockets.socket:
    listening = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM)
    try:
        listening.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        if hasattr(sockets, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
            listening.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, SILENT_MILLISECONDS)
        listening.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise UserError(f"port {port} cannot be used: {error}. Choose another --port, or leave it out") from None
    return listening


def _on_socket(path: Path) -> sockets.socket:
    """A Unix socket of mode 600 from its first moment on. The file of a service that was killed is replaced."""
    listening = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        _remove_abandoned(path)
        listening.bind(os.fspath(path))
    except OSError as error:
        listening.close()
        why = "the path is too long" if error.errno is None else error.strerror
        raise UserError(f"the socket {path} cannot be created: {why}. Choose another --socket") from None
    except UserError:
        listening.close()
        raise
    finally:
        os.umask(before)
    return listening


def _remove_abandoned(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UserError(f"--socket {path} exists and is not a socket: choose another path")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            if error.errno != errno.ECONNREFUSED:
                raise
            path.unlink()
            return
    raise UserError(f"--socket {path} belongs to a service that is running: use it, or choose another path")
