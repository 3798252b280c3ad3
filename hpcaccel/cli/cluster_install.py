"""``cluster install``: hpcaccel in an environment of its own on the cluster's shared file system."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.output import note

if TYPE_CHECKING:
    from hpcaccel.submission.probing.pip_progress import Tell

__all__ = ["install"]


def install(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The profile's name.", show_default=False)],
    directory: Annotated[
        str | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="A directory that all nodes see. Default: ~/.local/share/hpcaccel.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[str, typer.Option(metavar="PYTHON", help="The Python there, 3.10 or newer.")] = "python3",
    wheel: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A wheel of hpcaccel. Default: this version.", show_default=False),
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="An extra of hpcaccel's: train, sweep.", show_default=False),
    ] = None,
    package: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="One more package, as pip writes it: torch==2.6.0.", show_default=False),
    ] = None,
) -> None:
    """Build an environment with hpcaccel on the cluster, with the versions that this one has."""
    from hpcaccel.spec import load_profile
    from hpcaccel.spec.site import load_facts, store_facts
    from hpcaccel.submission.probing.installing import DEFAULT_DIRECTORY, install_hpcaccel
    from hpcaccel.submission.probing.profiles import set_program

    profile = load_profile(name)
    assert profile is not None
    where = directory or DEFAULT_DIRECTORY
    note(f"building an environment in {where} on {profile.host or 'this machine'}; this takes some minutes …")
    with _progress() as tell:
        found = install_hpcaccel(
            profile, directory=where, python=python, wheel=wheel, extras=extra or [], packages=package or [], tell=tell
        )
    typer.echo(f"{found.version} is in {found.environment}; the versions of all packages: {found.lock}")
    if (facts := load_facts(name)) is not None:
        store_facts(facts.model_copy(update={"hpcaccel": found.version.removeprefix("hpcaccel ")}))
    if profile.host is not None and not set_program(profile, found.program):
        note(f"the profile names another program: set `hpcaccel: {found.program}` in {profile.source}")
    typer.echo(f"to train with it, set environment.venv: {found.environment}")


@contextmanager
def _progress() -> Iterator[Tell]:
    """What pip is doing: on a terminal a line that changes, with how much of a download is here; else a line each."""
    from hpcaccel.view.formatting import clean

    if not sys.stderr.isatty():
        yield lambda doing, percent: note(f"  {clean(doing)}") if percent is None else None
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    with console.status("making the environment …") as status:

        def show(doing: str, percent: int | None) -> None:
            here = "" if percent is None else f" {percent} %"
            room = max(10, console.width - len(here) - 4)  # the spinner, and a line that does not wrap
            words = clean(doing)
            status.update(Text((words if len(words) <= room else f"{words[: room - 1]}…") + here))

        yield show
