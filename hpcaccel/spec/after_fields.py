"""Runs that come before this one: ``after: [prepare, afterany:clean]``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, WithJsonSchema

from hpcaccel.spec.fields import checked_text
from hpcaccel.spec.yaml12 import Plain

__all__ = ["KINDS", "After", "Dependency", "parse_dependency"]

Kind = Literal["afterok", "afterany", "afternotok"]
KINDS: tuple[Kind, ...] = ("afterok", "afterany", "afternotok")
"""sbatch's own words: when the other run has ended well, has ended, has ended without that."""

_TOKEN = re.compile(r"[A-Za-z0-9/~.][^\s:,?]*")


class Dependency(NamedTuple):
    """One run to wait for, by whatever names a run: its name, id, job id or directory."""

    kind: Kind
    run: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.run}"


def parse_dependency(text: str) -> Dependency:
    """``prepare``, which is ``afterok:prepare``, or one of ``KINDS`` with a colon in front.

    Raises:
        ValueError: in words that continue what stands there.
    """
    kind, colon, run = text.partition(":")
    if not colon:
        kind, run = "afterok", text
    if kind not in KINDS:
        raise ValueError(f"is not a dependency: {kind!r} is not allowed (has: {', '.join(KINDS)})")
    if not _TOKEN.fullmatch(checked_text(run)):
        raise ValueError("is not a dependency: write the name of a run, or afterany:NAME")
    return Dependency(kind, run)


def _dependency(value: Any) -> str:
    text = value.text if isinstance(value, Plain) else value
    if not isinstance(text, str | int) or isinstance(text, bool):
        raise ValueError("must be the name of a run")
    return str(parse_dependency(str(text)))


After = Annotated[str, BeforeValidator(_dependency), WithJsonSchema({"type": ["string", "integer"], "minLength": 1})]
"""A dependency, with its kind written out."""
