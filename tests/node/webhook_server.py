"""A webhook on this machine that records what it gets, and can be slow, refuse, fail, redirect or not answer."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "/services/T00SECRET00/B1234567/verySecretToken"


class Receiver:
    """Answers ``answers`` one after another, the last one for ever: a status, ``hang``, ``drip`` (an answer that never
    ends), or a redirect's target."""

    def __init__(self, *answers: int | str) -> None:
        self.answers = list(answers) or [200]
        self.got: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.released = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append({"path": self.path, **json.loads(body)})
                receiver.keys.append(self.headers["Idempotency-Key"])
                answer = receiver.answers.pop(0) if len(receiver.answers) > 1 else receiver.answers[0]
                if answer == "hang":
                    receiver.released.wait(120)
                    return
                if answer == "drip":
                    while not receiver.released.wait(0.05):
                        self.wfile.write(b"H")
                    return
                self.send_response(307 if isinstance(answer, str) else answer)
                if isinstance(answer, str):
                    self.send_header("Location", answer)
                text = b"ok" if answer == 200 else b"no: " + self.path.encode()
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}{SECRET}"

    @property
    def events(self) -> list[str]:
        return [f"{one['event']}:{one['attempt']}" for one in self.got]

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
