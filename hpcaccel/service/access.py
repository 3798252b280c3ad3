"""Access control of the service: Host, Origin, token, size of the body, and time limits of slow connections.

A page of another site cannot use the service: browsers send its Origin, which is refused; a name that an attacker
points to 127.0.0.1 is refused by its Host. A token is required unless the service has a Unix socket of mode 600.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hpcaccel.service.service_settings import ServiceSettings

__all__ = ["MOST_BODY_BYTES", "AccessControl", "cookie_name"]

MOST_BODY_BYTES = 8 << 20
"""Largest body of a request. A spec has at most 4 MB."""
DRAINED_BYTES = 64 << 20
"""A client that sends a larger body than allowed gets its answer after this many bytes, which are discarded."""
RECEIVE_SECONDS = 30.0
"""Longest pause inside the body of a request."""
SEND_SECONDS = 60.0
"""A client that takes nothing for this long is disconnected."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "SAMEORIGIN",
}
"""Headers of all answers."""
HARMLESS_POSTS = ("check", "render", "plan")
"""Routes below the API that a demo answers, although they are POSTs."""
DEMO = (
    "this is a demo with recorded runs: nothing is submitted or changed. For your own runs, start `hpcaccel serve` "
    "without --demo"
)
SIGN_IN = """<!doctype html><html lang="en"><meta charset="utf-8"><title>hpcaccel</title>
<body style="font:16px/1.5 system-ui;max-width:40em;margin:4em auto;padding:0 1em">
<h1>This page needs its link</h1><p>Open the link that <code>hpcaccel serve</code> has printed: it contains the token.
"""


class _Refused(Exception):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


class AccessControl:
    """ASGI middleware; see the module. Requests whose path lacks the base path (a proxy has removed it) get it back."""

    def __init__(self, app: ASGIApp, settings: ServiceSettings) -> None:
        self.app = app
        self.settings = settings
        self.cookie = cookie_name(settings.token or "")
        self.hosts = {*LOCAL_HOSTS, *(host.lower() for host in settings.hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = _Answer(send)
        try:
            self._check(scope)
            if (target := self._sign_in(scope)) is not None:
                await answer.redirect(target, cookie=self._set_cookie())
                return
            limited = await _limited(scope, receive)
            await self.app(scope, limited, answer.send)
        except _Refused as refused:
            await answer.refuse(refused, html=_wants_html(scope))
        except TimeoutError:
            if not answer.started:
                await answer.refuse(_Refused(400, "the body of the request did not arrive in time"), html=False)
            # Otherwise the client takes nothing: the connection ends with an incomplete answer.

    def _check(self, scope: Scope) -> None:
        path = scope["path"]
        if "\0" in path or any(part == ".." for part in path.split("/")):
            raise _Refused(400, "the path contains '..' or a zero byte")
        host = _header(scope, b"host") or ""
        if _name(host) not in self.hosts:
            raise _Refused(403, f"host {host[:80]!r} is not this service: use localhost, or start it with --allow-host")
        self._check_origin(scope, host)
        base = self.settings.base_path
        if base and path != base and not path.startswith(f"{base}/"):
            scope["path"] = base + path
            scope["raw_path"] = base.encode() + (scope.get("raw_path") or path.encode())
        if self.settings.token is not None and not any(self._matches(token) for token in self._tokens(scope)):
            raise _Refused(401, "the token is missing or wrong: use the link that `hpcaccel serve` has printed")
        api = f"{base}/api/v1/"
        is_action = scope["method"] == "POST" and scope["path"].startswith(api)
        if self.settings.demo and is_action and scope["path"].removeprefix(api) not in HARMLESS_POSTS:
            raise _Refused(409, DEMO)

    def _check_origin(self, scope: Scope, host: str) -> None:
        origin = _header(scope, b"origin")
        if origin is None:
            return
        there = urlsplit(origin).netloc.lower()
        if there != host.lower() and _name(there) not in {name.lower() for name in self.settings.hosts}:
            advice = "if that is your proxy, start the service with --allow-host"
            raise _Refused(403, f"requests from {origin[:80]!r} are not accepted: {advice}")

    def _tokens(self, scope: Scope) -> Iterable[str]:
        kind, _, given = (_header(scope, b"authorization") or "").partition(" ")
        if kind.lower() == "bearer":
            yield given.strip()
        try:
            found = SimpleCookie(_header(scope, b"cookie") or "").get(self.cookie)
        except CookieError:
            found = None
        if found is not None:
            yield found.value
        if scope["method"] in ("GET", "HEAD"):
            yield from (value for key, value in _query(scope) if key == "token")

    def _matches(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), (self.settings.token or "").encode())

    def _sign_in(self, scope: Scope) -> str | None:
        """Where a page with ``?token=`` is redirected: the same page, relative, without the token."""
        base, path = self.settings.base_path, scope["path"]
        if self.settings.token is None or path.startswith((f"{base}/api/", f"{base}/metrics")):
            return None
        query = _query(scope)
        rest = [(key, value) for key, value in query if key != "token"]
        if scope["method"] != "GET" or len(rest) == len(query):
            return None
        # A page at the base path itself, without a slash, is redirected below it.
        target = f"{base.rpartition('/')[2]}/" if path == base else path.rpartition("/")[2] or "./"
        return target + (f"?{urlencode(rest)}" if rest else "")

    def _set_cookie(self) -> str:
        path = f"{self.settings.base_path}/"
        return f"{self.cookie}={self.settings.token}; Path={path}; HttpOnly; SameSite=Strict"


def cookie_name(token: str) -> str:
    """A name of its own for each token: cookies do not distinguish ports, and several services can run at once."""
    return f"hpcaccel_{hashlib.sha256(token.encode()).hexdigest()[:12]}"


class _Answer:
    """Sends messages with a time limit, and adds the headers of all answers."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            present = {name.lower() for name, _ in message.get("headers", [])}
            added = [(key.encode(), value.encode()) for key, value in HEADERS.items() if key.encode() not in present]
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await asyncio.wait_for(self._send(message), SEND_SECONDS)

    async def _whole(self, status: int, headers: dict[str, str], body: bytes) -> None:
        pairs = [(key.encode(), value.encode()) for key, value in headers.items()]
        pairs.append((b"content-length", str(len(body)).encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})
        await self.send({"type": "http.response.body", "body": body})

    async def refuse(self, refused: _Refused, *, html: bool) -> None:
        headers = {"www-authenticate": "Bearer"} if refused.status == 401 else {}
        if html and refused.status == 401:
            await self._whole(401, {**headers, "content-type": "text/html; charset=utf-8"}, SIGN_IN.encode())
            return
        body = json.dumps({"error": refused.sentence}).encode()
        await self._whole(refused.status, {**headers, "content-type": "application/json"}, body)

    async def redirect(self, target: str, *, cookie: str) -> None:
        await self._whole(303, {"location": target, "set-cookie": cookie, "cache-control": "no-store"}, b"")


async def _limited(scope: Scope, receive: Receive) -> Callable[[], Any]:
    """``receive`` with limits on the size of the body and on pauses in it."""
    too_large = f"the request is larger than {MOST_BODY_BYTES >> 20} MB"
    declared = _header(scope, b"content-length") or "0"
    if declared.isdecimal() and int(declared) > MOST_BODY_BYTES:
        left = DRAINED_BYTES
        while left > 0:
            message = await asyncio.wait_for(receive(), RECEIVE_SECONDS)
            left -= len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body"):
                break
        raise _Refused(413, too_large)
    state: MutableMapping[str, Any] = {"size": 0, "whole": False}

    async def limited() -> Message:
        if state["whole"]:
            return await receive()  # waits for the end of the connection
        message = await asyncio.wait_for(receive(), RECEIVE_SECONDS)
        state["size"] += len(message.get("body", b""))
        state["whole"] = not message.get("more_body")
        if state["size"] > MOST_BODY_BYTES:
            raise HTTPException(413, too_large)
        return message

    return limited


def _header(scope: Scope, name: bytes) -> str | None:
    values = [value.decode("latin-1") for key, value in scope["headers"] if key == name]
    return values[0] if values else None


def _name(netloc: str) -> str:
    """The host of ``host:port``, in lower case."""
    host, colon, port = netloc.rpartition(":")
    return (host if colon and port.isdecimal() else netloc).lower()


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)


def _wants_html(scope: Scope) -> bool:
    return "text/html" in (_header(scope, b"accept") or "")
