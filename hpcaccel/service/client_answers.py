"""Answers of the service to a client, beyond the overviews of ``hpcaccel.view``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcaccel.view.run_overview import Overview

__all__ = ["LogText", "RunPage", "Submission"]


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """Some rows of the list of runs or sweeps; ``total`` is the number of all that match."""

    runs: list[Overview]
    total: int


@dataclass(frozen=True, kw_only=True)
class LogText:
    """A range of a log: ``next_offset`` is where the next one begins, ``size`` the size of the file, in bytes."""

    name: str
    text: str
    offset: int
    next_offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A submitted run or sweep."""

    run_id: str
    name: str
    job_id: str
    path: str
    cluster: str
    tasks: int | None
    repeated: bool
    """Whether an earlier request with the same key has submitted it."""
    warnings: list[str] = field(default_factory=list)
