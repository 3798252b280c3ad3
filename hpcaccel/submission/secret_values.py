"""Values of ``environment.secrets``: they are in the environment of who submits, and nowhere that could be read later.

A run that is handed in again needs them again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from hpcaccel.errors import UserError

__all__ = ["Source", "bring_secrets", "secrets_from"]

Source = Callable[[Sequence[str]], Mapping[str, str]]
"""Where values come from that are not in this process's environment: those that it knows, by name."""

_SOURCE: ContextVar[Source | None] = ContextVar("_SOURCE", default=None)


@contextmanager
def secrets_from(source: Source) -> Iterator[None]:
    """Let ``source`` be asked within the block."""
    token = _SOURCE.set(source)
    try:
        yield
    finally:
        _SOURCE.reset(token)


def bring_secrets(names: Sequence[str], *, run_id: str) -> None:
    """Have this process's environment hold what a job of ``run_id`` is to get.

    Raises:
        UserError: a secret has no value.
    """
    source = _SOURCE.get()
    if source is not None and (lacking := _lacking(names)):
        os.environ.update(source(lacking))
    if lacking := _lacking(names):
        raise UserError(
            f"{', '.join(lacking)} (environment.secrets of {run_id}) is not set here, and the job would not have it. "
            "Export it first, then say this again"
        )


def _lacking(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in os.environ]
