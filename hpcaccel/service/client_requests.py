"""Base of the client's parts: the connection, and requests whose answer is JSON or text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hpcaccel.service.client_connection import ServiceConnection
from hpcaccel.service.json_values import from_json

if TYPE_CHECKING:
    from hpcaccel.view.run_overview import Overview

__all__ = ["ClientRequests", "overview_of", "path_part"]


class ClientRequests:
    """Sends requests on one connection."""

    _connection: ServiceConnection

    def _get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        return json.loads(self._connection.request("GET", path, query=query))

    def _post(self, path: str, body: Mapping[str, Any] | None = None, *, key: str | None = None) -> Any:
        return json.loads(self._connection.request("POST", path, body=body, key=key))

    def _text(self, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, Any] | None = None) -> str:
        return self._connection.request("GET" if body is None else "POST", path, body=body, query=query).decode()


def path_part(text: str) -> str:
    """Quote ``text`` as one part of a URL's path."""
    return quote(text, safe="")


def overview_of(value: Any) -> Overview:
    """The overview in a JSON value of an answer."""
    from hpcaccel.view.run_overview import Overview

    return from_json(Overview, value)
