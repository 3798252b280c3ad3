"""The address of a page, relative to the path below which the browser sees the service."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

__all__ = ["Place", "place_of"]

_ADDRESS = re.compile(
    r"(?P<prefix>/(?:.*/)?)(?:(?P<kind>run|sweep)/(?P<ident>[A-Za-z0-9][A-Za-z0-9._+:-]{0,255})|(?P<top>sweeps|submit))?"
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A page: ``runs``, ``run``, ``sweeps``, ``sweep``, ``submit``, or ``unknown``."""

    prefix: str
    """The path of the service as the browser sees it, with a slash at its end. A proxy may have added a part that is
    not in the service's settings."""
    page: str
    ident: str = ""
    """The run's or the sweep's id; of another cluster's run ``CLUSTER:RUN``."""

    def href(self, page: str, ident: str = "") -> str:
        """The path of another page."""
        if page == "runs":
            return self.prefix
        return f"{self.prefix}{page}/{quote(ident, safe=':')}" if ident else f"{self.prefix}{page}"

    def api(self, path: str) -> str:
        """The path of a route of REST."""
        return f"{self.prefix}api/v1/{path}"

    @property
    def depth(self) -> int:
        """How many folders below the service's path the page is."""
        return 1 if self.ident else 0


def place_of(path: str) -> Place:
    """The page at ``path``, a path as the browser or the service sees it."""
    path = unquote(path)
    found = _ADDRESS.fullmatch(path)
    if found is None:
        return Place(prefix=path.rpartition("/")[0] + "/", page="unknown")
    page = found["kind"] or found["top"] or "runs"
    return Place(prefix=found["prefix"], page=page, ident=found["ident"] or "")
