"""``serve``: the page and REST on this machine."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from hpcaccel.cli.options import RunsDir
from hpcaccel.cli.output import note
from hpcaccel.errors import UserError

__all__ = ["serve"]


def serve(
    port: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=65535, help="Port on 127.0.0.1. Default: a free one.", show_default=False),
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Unix socket that only you can open, in place of a port: for ssh -L 8000:PATH.",
            show_default=False,
        ),
    ] = None,
    base_path: Annotated[
        str,
        typer.Option(metavar="PATH", help="Path below which a proxy shows the page, such as /rnode/n1/8000."),
    ] = "",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Name of the proxy, as the browser shows it; repeatable.", show_default=False
        ),
    ] = None,
    runs_dir: RunsDir = None,
    open_: Annotated[bool, typer.Option("--open/--no-browser", help="Open the page in a browser.")] = False,
    demo: Annotated[bool, typer.Option("--demo", help="Show recorded runs in place of yours.")] = False,
) -> None:
    """Show runs and sweeps on a page in the browser, and to programs (REST). Runs until Ctrl-C.

    Only you can use it: the link contains a token, and a Unix socket belongs to you. It acts as you.
    """
    if socket is not None and port is not None:
        raise UserError("--socket replaces --port: give only one of them")
    try:
        from hpcaccel.service.web_server import serve as run_server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("fastapi", "starlette", "uvicorn", "anyio"):
            raise
        raise UserError(
            f"serve needs {error.name}, which is not installed for {sys.executable}: pip install 'hpcaccel[ui]'"
        ) from None

    folder: AbstractContextManager[Path | None]
    if demo:
        from hpcaccel.service.demo_runs import demo_runs

        folder = demo_runs()
        note("demo: recorded runs and a recorded sweep; nothing is submitted or changed")
    else:
        folder = nullcontext(runs_dir)
    with folder as place:
        run_server(
            port=port or 0,
            socket=socket,
            base_path=base_path,
            hosts=allow_host or [],
            runs_dir=None if place is None else place.absolute(),
            demo=demo,
            started=lambda link, ways: _announce(link, ways, socket, in_browser=open_),
        )


def _announce(link: str, ways: list[str], socket: Path | None, *, in_browser: bool) -> None:
    """Print the link, and how to reach it from another computer."""
    typer.echo(link)
    if socket is not None:
        note(f"the service is on {socket.absolute()}; on your own computer:")
    elif ways:
        note("on your own computer:")
    for way in ways:
        note(f"  {way}")
    note("then open the link. Ctrl-C ends the service; runs go on" if ways else "Ctrl-C ends it; runs go on")
    sys.stdout.flush()
    if in_browser:
        typer.launch(link)
