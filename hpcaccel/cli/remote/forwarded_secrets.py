"""Which of this machine's variables a login node gets when it hands a job in again, and asks for them.

Somebody may have taken that machine over: what it asks for is a claim. It gets what the run's spec declared when it was
submitted from here, and what the user names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from hpcaccel.errors import UserError

__all__ = ["Secret", "given", "may_have", "refuse_here"]

Secret = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="NAME",
        help="Hand this variable on to the cluster behind SSH, of a run that was not submitted from here; repeatable.",
        show_default=False,
    ),
]

_OPTION = "secret"
_SHOWN = 10


def may_have(cluster: str, runs: Iterable[str], values: dict[str, Any]) -> frozenset[str]:
    """The names that may be asked for in answer to a command with the arguments ``values``.

    Args:
        runs: those it is about, as they are called there.

    Raises:
        UserError: ``--secret`` names no variable, or one that is not set here.
    """
    from hpcaccel.submission.remote.remote_index import secrets_of

    if _OPTION not in values:
        return frozenset()  # it hands no job in
    named = values[_OPTION] or []
    for name in named:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            raise UserError(f"--secret {name!r} is not the name of a variable. Its value is taken from the environment")
        if name not in os.environ:
            raise UserError(f"--secret {name}: {name} is not set here. Export it first")
    return frozenset(named).union(*(secrets_of(cluster, run) for run in runs))


def refuse_here(values: dict[str, Any]) -> None:
    """Raises UserError for ``--secret`` of a run on this machine, where it would mean nothing."""
    if values.get(_OPTION):
        raise UserError(
            "--secret is for runs on a cluster behind SSH: a run of this machine gets what its spec lists under "
            "environment.secrets from this shell"
        )


def given(cluster: str, asked: Sequence[Any], allowed: frozenset[str]) -> dict[str, str]:
    """The values that the login node gets; of one that is not set here it will complain.

    Raises:
        UserError: it asks for something that it may not have. Then it gets nothing at all.
    """
    names = [str(name) for name in asked]
    refused = [name for name in names if name not in allowed]
    if not refused:
        return {name: os.environ[name] for name in names if name in os.environ}
    from hpcaccel.view.formatting import clean

    words = ", ".join(clean(name)[:80] for name in refused[:_SHOWN]) + (" …" if len(refused) > _SHOWN else "")
    raise UserError(
        f"{cluster} asks for variables of this machine ({words}) that the run did not list under environment.secrets "
        "when it was submitted from here. Nothing was handed on, and nothing was done. Where you know that its jobs "
        "need them (the run was submitted from another machine, or with an older hpcaccel), name each: --secret NAME, "
        "with resume, sweep resume, retry-failed and extend. Otherwise ask the site who has changed that machine"
    )
