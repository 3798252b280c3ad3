"""Sweep specs for tests, from Python values."""

from __future__ import annotations

from typing import Any

from hpcaccel.spec import SweepSpec, sweep_from_values

LR = {"float": [1e-4, 1e-1], "log": True}
SMALL = {"args.lr": {"choice": [1, 2]}, "args.depth": {"int": [2, 4]}}
"""Six points."""


def made(parameters: dict[str, Any] | None = None, *, args: dict[str, Any] | None = None, **sweep: Any) -> SweepSpec:
    """A sweep that minimises ``loss`` over ``args.lr``; keyword arguments replace keys of its section."""
    values = {"metric": "loss", "max_trials": 20, "parameters": parameters or {"args.lr": LR}, **sweep}
    return sweep_from_values({"name": "g", "entrypoint": {"command": ["x"], "args": args or {}}, "sweep": values})
