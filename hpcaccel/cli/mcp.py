"""``mcp``: tools for agents, over the Model Context Protocol."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hpcaccel.cli.options import RunsDir
from hpcaccel.errors import UserError

__all__ = ["mcp"]


def mcp(
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Also offer tools that submit, stop, save, cancel and resume.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Address of a running `hpcaccel serve`; its token is in HPCACCEL_SERVICE_TOKEN.",
            show_default=False,
        ),
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Unix socket of a running `hpcaccel serve --socket`.", show_default=False),
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Serve tools for agents on standard input and output (MCP); they only read.

    An agent's program starts this command by itself: see docs/mcp.md.
    """
    try:
        from hpcaccel.service.mcp.tool_server import make_server, private_service
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("mcp", "mcp_types", "fastapi", "uvicorn"):
            raise
        raise UserError(
            f"mcp needs {error.name}, which is not installed for {sys.executable}: pip install 'hpcaccel[mcp]'"
        ) from None
    if (url is not None or socket is not None) and runs_dir is not None:
        raise UserError("--runs-dir is an option of the running service: give it to `hpcaccel serve`")
    from hpcaccel.service.client import Client

    service: AbstractContextManager[Any]
    if url is not None or socket is not None:
        service = nullcontext(partial(Client, url or "http://127.0.0.1", socket=socket))
    else:
        service = private_service(None if runs_dir is None else runs_dir.absolute())
    with service as connect:
        make_server(connect, allow_actions=allow_actions).run("stdio")
