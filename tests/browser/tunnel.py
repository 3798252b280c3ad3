"""A proxy in front of the service: it can be cut, and it can stand for Open OnDemand's ``/node`` and ``/rnode``."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Tunnel:
    """Forwards HTTP from a port of its own to ``port``.

    Args:
        strip: a path that is removed from the front of each request's path; requests elsewhere get 404.
    """

    def __init__(self, port: int, strip: str = "") -> None:
        self.to = port
        self.strip = strip
        self.open = threading.Event()
        self.open.set()
        tunnel = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                tunnel.forward(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]

    def forward(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        if not self.open.is_set():  # like a tunnel whose other end is gone: the connection ends without an answer
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        if not request.path.startswith(self.strip):
            request.send_error(404)
            return
        there = http.client.HTTPConnection("127.0.0.1", self.to, timeout=60)
        try:
            headers = {key: value for key, value in request.headers.items() if key.lower() not in HOP_BY_HOP}
            there.request(request.command, request.path.removeprefix(self.strip), body or None, headers)
            answer = there.getresponse()
            content = answer.read()
            request.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in {*HOP_BY_HOP, "date", "server"}:
                    request.send_header(key, value)
            if answer.status not in (204, 304):
                request.send_header("Content-Length", str(len(content)))
            request.end_headers()
            request.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):
            request.close_connection = True  # the browser has given up
        finally:
            there.close()

    def cut(self) -> None:
        self.open.clear()

    def mend(self) -> None:
        self.open.set()


@contextmanager
def tunnel(port: int, strip: str = "") -> Iterator[Tunnel]:
    made = Tunnel(port, strip)
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join(timeout=60)
