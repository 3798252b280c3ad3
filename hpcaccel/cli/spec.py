"""``schema``, ``validate``, ``render``: spec files, before anything is submitted."""

from __future__ import annotations

from hpcaccel.cli.options import Cluster, Json, Overrides, RunsDir, SpecFile

__all__ = ["render", "schema", "validate"]


def schema() -> None:
    """Print the JSON Schema of spec files, for editors."""


def validate(file: SpecFile, overrides: Overrides = None, cluster: Cluster = None, json: Json = False) -> None:
    """Check a spec file; all mistakes are named at once."""


def render(file: SpecFile, overrides: Overrides = None, cluster: Cluster = None, runs_dir: RunsDir = None) -> None:
    """Print the batch script that `submit` would submit; nothing is touched."""
