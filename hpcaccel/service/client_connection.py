"""Connection of a client to the service: requests, errors, server-sent events; on a port or a Unix socket."""

from __future__ import annotations

import http.client
import json
import os
import select
import socket as sockets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from hpcaccel.errors import HpcaccelError, RunBusy, RunNotFound, SpecError, UserError

__all__ = ["TIMEOUT_SECONDS", "ServiceConnection", "ServiceError", "ServiceSpecError"]

TOKEN_VARIABLE = "HPCACCEL_SERVICE_TOKEN"
TIMEOUT_SECONDS = 60.0
RECONNECT_SECONDS = 2.0
RECONNECTS = 30
"""``events`` gives up after this many failed connections in a row."""


class ServiceError(UserError):
    """The service refused a request, or cannot be reached. ``status`` is the HTTP status; 0 without an answer."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class ServiceSpecError(SpecError):
    """A spec that the service did not accept. ``details`` has ``path``, ``line``, ``message`` and ``suggestion`` of
    each problem."""

    def __init__(self, details: Sequence[Mapping[str, Any]], *, hints: Sequence[str] = ()) -> None:
        self.details = [dict(one) for one in details]
        lines = [f"spec.yaml:{one['line']}: {one['message']}" if one["line"] else one["message"] for one in details]
        super().__init__(lines, hints=hints)


class ServiceConnection:
    """A connection; see ``Client`` for the arguments."""

    def __init__(
        self, url: str, token: str | None, socket: str | os.PathLike[str] | None, *, timeout_seconds: float
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise UserError(f"{parts.scheme}://{parts.netloc} is not the address of a service: write http://HOST:PORT")
        self._parts = parts
        self._socket = None if socket is None else os.fspath(socket)
        self._base = parts.path.rstrip("/")
        in_link = parse_qs(parts.query).get("token", [None])[0]
        self._token = token or in_link or os.environ.get(TOKEN_VARIABLE)
        self._timeout = timeout_seconds
        self._open: http.client.HTTPConnection | None = None

    def __str__(self) -> str:
        return self._socket or f"{self._parts.scheme}://{self._parts.netloc}{self._base}"

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> bytes:
        """The body of the answer.

        Raises:
            ServiceSpecError, RunNotFound, RunBusy, ServiceError: the service refused the request.
            ServiceError: the service cannot be reached; ``status`` is 0.
        """
        given = {name: value for name, value in (query or {}).items() if value is not None}
        target = f"{self._base}/api/v1/{path}" + (f"?{urlencode(given, doseq=True)}" if given else "")
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers() | ({} if key is None else {"Idempotency-Key": key})
        if data is not None:
            headers["Content-Type"] = "application/json"
        try:
            status, answer = self._exchange(method, target, data, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ServiceError(0, f"the service at {self} cannot be reached: {error or type(error).__name__}") from None
        if status >= 400:
            raise _error(status, answer)
        return answer

    def _exchange(self, method: str, target: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        kept = self._open is not None
        try:
            return self._send(method, target, data, headers)
        except (ConnectionError, http.client.RemoteDisconnected):
            # The service has closed a connection that was not used for a while. A POST may have begun there: the
            # caller repeats it, with the same key.
            self.close()
            if not kept or method != "GET":
                raise
            return self._send(method, target, data, headers)

    def _send(self, method: str, target: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._open is not None and self._open.sock is not None and select.select([self._open.sock], [], [], 0)[0]:
            self.close()  # readable before a request: the service has closed it
        connection = self._open = self._open or self._connect(self._timeout)
        connection.request(method, target, body=data, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def events(self, path: str, *, offset: int) -> Iterator[tuple[str, Any]]:
        """Server-sent events with their data, on a connection of their own, until the event ``end``. After a lost
        connection, they go on at ``next_offset`` of the last event."""
        failed = 0
        while True:
            connection = self._connect(self._timeout)
            try:
                connection.request("GET", f"{self._base}/api/v1/{path}?offset={offset}", headers=self._headers())
                answer = connection.getresponse()
                if answer.status >= 400:
                    raise _error(answer.status, answer.read())
                for event, data in _events(answer):
                    failed = 0
                    yield event, data
                    if event == "end":
                        return
                    offset = data["next_offset"]
            except (OSError, http.client.HTTPException) as error:
                failed += 1
                if failed > RECONNECTS:
                    raise ServiceError(0, f"the service at {self} cannot be reached: {error}") from None
            finally:
                connection.close()
            time.sleep(RECONNECT_SECONDS)

    def _headers(self) -> dict[str, str]:
        return {} if self._token is None else {"Authorization": f"Bearer {self._token}"}

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._socket is not None:
            return _UnixConnection(self._socket, timeout)
        assert self._parts.hostname is not None
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname, self._parts.port, timeout=timeout)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    event, data = "", ""
    while line := answer.readline():
        text = line.decode().rstrip("\r\n")
        name, _, value = text.partition(":")
        if name == "event":
            event = value.strip()
        elif name == "data":
            data += value.removeprefix(" ")
        elif not text and data:
            yield event, json.loads(data)
            event, data = "", ""


def _error(status: int, answer: bytes) -> HpcaccelError:
    try:
        document = json.loads(answer)
        sentence = str(document["error"])
    except (ValueError, KeyError, TypeError):
        text = answer[:200].decode(errors="replace")
        return ServiceError(status, f"the service responded with status {status}: {text}")
    if status == 422 and document.get("problems"):
        return ServiceSpecError(document["problems"], hints=document.get("hints", []))
    if status == 404:
        return RunNotFound(sentence)
    return RunBusy(sentence) if status == 409 else ServiceError(status, sentence)
