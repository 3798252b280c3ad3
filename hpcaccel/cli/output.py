"""How commands print."""

from __future__ import annotations

import json
from typing import Any

import typer

__all__ = ["note", "print_json"]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def note(message: str) -> None:
    """Something for people: on stderr, so that stdout holds nothing but what was asked for."""
    typer.echo(message, err=True)
