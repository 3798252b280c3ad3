"""``cluster install``: installs hpcaccel into an environment of its own on the cluster's shared file system."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.output import note

if TYPE_CHECKING:
    from hpcaccel.submission.remote.install import ProgressCallback

__all__ = ["install"]


def install(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the profile.", show_default=False)],
    directory: Annotated[
        str | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="A directory visible to all nodes. Default: ~/.local/share/hpcaccel.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[str, typer.Option(metavar="PYTHON", help="Python on the cluster, 3.10 or newer.")] = "python3",
    wheel: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="hpcaccel wheel to install. Default: this version.", show_default=False),
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Extra of the hpcaccel package, such as train or sweep; repeatable.",
            show_default=False,
        ),
    ] = None,
    package: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC", help="Additional pip requirement, such as torch==2.6.0; repeatable.", show_default=False
        ),
    ] = None,
) -> None:
    """Build an environment with hpcaccel on the cluster, with the package versions of this machine."""
    from hpcaccel.spec import load_profile
    from hpcaccel.spec.cluster.cluster_facts import load_facts, store_facts
    from hpcaccel.submission.clusters.probe import set_program
    from hpcaccel.submission.remote.install import DEFAULT_DIRECTORY, install_hpcaccel

    profile = load_profile(name)
    assert profile is not None
    where = directory or DEFAULT_DIRECTORY
    note(f"building an environment in {where} on {profile.host or 'this machine'}; this takes a few minutes …")
    with _progress() as on_progress:
        found = install_hpcaccel(
            profile,
            directory=where,
            python=python,
            wheel=wheel,
            extras=extra or [],
            packages=package or [],
            on_progress=on_progress,
        )
    typer.echo(f"installed {found.version} in {found.environment}; the versions of all packages are in {found.lock}")
    if (facts := load_facts(name)) is not None:
        store_facts(facts.model_copy(update={"hpcaccel": found.version.removeprefix("hpcaccel ")}))
    if profile.host is not None and not set_program(profile, found.program):
        note(
            "the profile uses another hpcaccel installation. To use this one, "
            f"set `hpcaccel: {found.program}` in {profile.source}"
        )
    typer.echo(f"to train with it, set environment.venv: {found.environment}")


@contextmanager
def _progress() -> Iterator[ProgressCallback]:
    """Yield a callback that shows pip's progress. On a terminal it updates a single line, with the percentage of a
    download; elsewhere it prints a line for each step."""
    from hpcaccel.core.formatting import clean

    if not sys.stderr.isatty():
        yield lambda doing, percent: note(f"  {clean(doing)}") if percent is None else None
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    with console.status("creating the environment …") as status:

        def show(doing: str, percent: int | None) -> None:
            here = "" if percent is None else f" {percent} %"
            room = max(10, console.width - len(here) - 4)  # room beside the spinner, so that the line does not wrap
            words = clean(doing)
            status.update(Text((words if len(words) <= room else f"{words[: room - 1]}…") + here))

        yield show
