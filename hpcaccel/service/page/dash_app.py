"""The page as an application below REST: Dash on FastAPI, with relative addresses, so that any proxy may be in front.

Dash is configured for the root. The first HTML of a page refers to its files relatively, and a script in it sets the
path for Dash's program in the browser: ``/``, ``--base-path``, or what a proxy has added.
"""

from __future__ import annotations

import logging
import re
from html import escape
from pathlib import Path

from dash import Dash, set_props
from fastapi import FastAPI
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from hpcaccel.service.page import confirm, frame
from hpcaccel.service.page.client_calls import ClientCalls
from hpcaccel.service.page.place import place_of
from hpcaccel.service.service_settings import ServiceSettings

__all__ = ["ALIVE", "add_page"]

LOG = logging.getLogger(__name__)
ALIVE = "/_page/alive"
"""The route that the browser asks to see whether the service can be reached."""
CONTENT = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'"
)
"""The browser's own check that a page requests nothing from elsewhere."""
_FILE = re.compile(r'\b(src|href)="/(?!/)')
_BEGIN = """<script>(function () {
  var config = document.getElementById("_dash-config"), value = JSON.parse(config.textContent);
  delete value.websocket; // callbacks are plain HTTP
  value.requests_pathname_prefix = window.hpcaccelPrefix = new URL("%s", location.href).pathname;
  config.textContent = JSON.stringify(value);
})()</script>"""
INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<meta name="color-scheme" content="light dark">
<title>{%title%}</title>
<script>(function () {
  var kept = null;
  try { kept = localStorage.getItem("hpcaccel-scheme"); } catch (_) { /* storage is switched off */ }
  var scheme = kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.setAttribute("data-mantine-color-scheme", scheme);
  window.hpcaccelScheme = scheme;
})()</script>
<link rel="icon" href="data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E\
%3Crect width='16' height='16' rx='4' fill='%234f5bd5'/%3E%3Cpath d='M4 5h8M4 8h5M4 11h3' stroke='white' \
stroke-width='1.5' stroke-linecap='round'/%3E%3C/svg%3E">
{%css%}
</head>
<body>
{%app_entry%}
<footer>{%config%}<!--begin-->{%scripts%}{%renderer%}</footer>
</body>
</html>"""

NOTHING = """<!DOCTYPE html>
<html lang="en">
<head>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>hpcaccel</title>
<style>
body { margin: 0; padding: 22vh 24px 0; text-align: center; font: 14px/1.6 Inter, system-ui, sans-serif; }
h1 { font-size: 16px; } p { opacity: 0.75; overflow-wrap: anywhere; }
a { display: inline-block; padding: 5px 14px; border-radius: 6px; background: #4f5bd5; color: #fff; }
a:not(:hover) { text-decoration: none; }
</style>
</head>
<body class="blank"><h1>There is no such page</h1><p>%s has no run, sweep or form.</p><a href="%s">All runs</a></body>
</html>"""
"""The page of an unknown address. It needs no file: they are at another place."""


def add_page(app: FastAPI, settings: ServiceSettings) -> None:
    """Add the page to the service's application, after the REST routes: the page gets all other addresses."""
    app.mount(settings.base_path or "/", _Page(ClientCalls(settings.client), demo=settings.demo), name="page")


def _nothing(path: str, scope: Scope) -> Response:
    """The answer for an address that no page has: for a person with the way back, for a program as data."""
    accepted = b"".join(value for name, value in scope["headers"] if name == b"accept")
    if b"text/html" not in accepted:
        return JSONResponse({"error": f"there is nothing at {path[:80]}"}, status_code=404)
    up = "../" * (path.count("/") - 1) or "./"
    headers = {"content-security-policy": CONTENT, "cache-control": "no-store"}
    return HTMLResponse(NOTHING % (escape(path[:80]), up), status_code=404, headers=headers)


def _report(error: Exception) -> None:
    """Log what a callback has not expected, and show it; the page keeps its content."""
    LOG.error("a callback of the page has failed", exc_info=error)
    text = f"{type(error).__name__}: {error}. The log of hpcaccel serve has more."
    notice = {"id": "failed", "action": "show", "title": "The page has an error", "message": text, "color": "red"}
    set_props("notices", {"sendNotifications": [notice]})


class _Page:
    """The ASGI application of the page."""

    def __init__(self, calls: ClientCalls, *, demo: bool) -> None:
        self._server = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        self._dash = Dash(
            "hpcaccel.service.page",
            server=self._server,  # type: ignore[arg-type]
            backend="fastapi",
            assets_folder=str(Path(__file__).parent / "assets"),
            index_string=INDEX,
            title="hpcaccel",
            update_title="",
            suppress_callback_exceptions=True,
            meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
            add_log_handler=False,
            enable_mcp=False,
            on_error=_report,
        )
        self._dash.layout = frame.layout(demo=demo)
        frame.register(self._dash, calls)
        confirm.register(self._dash, calls)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        if path.startswith(("/_dash-", "/assets/")):
            await self._server({**scope, "path": path, "root_path": ""}, receive, send)
            return
        await (await self._answer(path, scope, receive))(scope, receive, send)

    async def _answer(self, path: str, scope: Scope, receive: Receive) -> Response:
        if path == ALIVE:
            return Response(status_code=204, headers={"cache-control": "no-store"})
        place = place_of(path)
        if scope["method"] not in ("GET", "HEAD") or place.page == "unknown" or place.prefix != "/":
            return _nothing(path, scope)
        up = "../" * place.depth or "./"
        text = _FILE.sub(rf'\1="{up}', await self._index(scope, receive)).replace("<!--begin-->", _BEGIN % up)
        return HTMLResponse(text, headers={"content-security-policy": CONTENT, "cache-control": "no-store"})

    async def _index(self, scope: Scope, receive: Receive) -> str:
        """The HTML that Dash makes for its root."""
        parts: list[bytes] = []

        async def keep(message: Message) -> None:
            parts.append(message.get("body", b""))

        await self._server({**scope, "method": "GET", "path": "/", "root_path": ""}, receive, keep)
        return b"".join(parts).decode()
