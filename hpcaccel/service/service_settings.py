"""Settings of one service: its address, its token, the paths under which it is reached."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from hpcaccel.errors import UserError
from hpcaccel.service.client import Client

__all__ = ["ServiceSettings", "normalized_base_path"]

_BASE_PATH = re.compile(r"(?:/[A-Za-z0-9._~-]+)*")


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Settings of the service, for ``create_app``.

    Raises:
        UserError: there is neither a token nor a Unix socket.
    """

    token: str | None = field(default=None, repr=False)
    """The secret that each request must have. None only for a Unix socket, which the file system protects."""
    port: int = 0
    """The port on 127.0.0.1; 0 for a service on a Unix socket."""
    socket: Path | None = None
    """The Unix socket, in place of a port."""
    base_path: str = ""
    """The path below which all pages are: ``/rnode/n1/8000``, without a slash at the end; empty for the root."""
    hosts: tuple[str, ...] = ()
    """Names of a proxy, in addition to ``localhost`` and ``127.0.0.1``, that Host and Origin may contain."""
    runs_dir: Path | None = None
    """A directory of runs beside those in the user's index. Default: the one that ``submit`` would use."""
    directory: Path = field(default_factory=Path.cwd)
    """Relative paths of a submitted spec refer to this directory."""
    demo: bool = False
    """Whether the runs are recorded ones. The page shows this, and actions and submissions are refused."""

    def __post_init__(self) -> None:
        if not self.token and self.socket is None:
            raise UserError("a service on a port needs a token: set HPCACCEL_SERVICE_TOKEN, or use --socket")

    @property
    def url(self) -> str:
        """The address of the service on this machine, with the base path; without the token."""
        return f"http://127.0.0.1:{self.port}{self.base_path}"

    def client(self) -> Client:
        """A client of this service. Each thread needs its own."""
        return Client(self.url, token=self.token, socket=self.socket)


def normalized_base_path(text: str) -> str:
    """``text`` with a slash at its beginning and none at its end.

    Raises:
        UserError: it is not a plain path.
    """
    path = "/" + text.strip("/") if text.strip("/") else ""
    if not _BASE_PATH.fullmatch(path) or ".." in path.split("/"):
        raise UserError(f"--base-path {text!r} is not a path such as /rnode/n1/8000")
    return path
