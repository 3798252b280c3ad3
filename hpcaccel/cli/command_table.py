"""The commands of the program and where each is defined. Importing this table imports no command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hpcaccel.cli.remote.forward import Effect

__all__ = ["COMMANDS", "GROUPS", "NOT_OURS", "CommandSource"]


class CommandSource(NamedTuple):
    """Where a command is defined."""

    module: str
    """Module of ``hpcaccel.cli``. It is imported when the command is needed."""
    attribute: str
    effect: Effect | None = None
    """If not None, the command is forwarded to the cluster of its run; see ``forward``."""
    hidden: bool = False
    cls: str | None = None
    """Class of the command in ``module``, if it is not Typer's."""


COMMANDS = {
    "init": CommandSource("init", "init"),
    "schema": CommandSource("spec", "schema"),
    "validate": CommandSource("spec", "validate"),
    "render": CommandSource("spec", "render"),
    "plan": CommandSource("plan", "plan"),
    "submit": CommandSource("submit", "submit"),
    "run": CommandSource("run", "run"),
    "logs": CommandSource("ranks", "logs"),
    "plot": CommandSource("runs", "plot"),
    "pull": CommandSource("steer", "pull"),
    "shell": CommandSource("ranks", "shell"),
    "env": CommandSource("config", "env"),
    "notify": CommandSource("notify", "notify"),
    "status": CommandSource("runs", "status", "reads"),
    "list": CommandSource("runs", "list_", "reads"),
    "top": CommandSource("top", "top"),
    "wait": CommandSource("runs", "wait", "follows"),
    "explain": CommandSource("runs", "explain", "reads"),
    "clean": CommandSource("steer", "clean", "changes"),
    "report": CommandSource("report", "report"),
    "stop": CommandSource("steer", "stop", "changes"),
    "save": CommandSource("steer", "save", "changes"),
    "profile": CommandSource("profile", "profile", "changes"),
    "mcp": CommandSource("mcp", "mcp"),
    "resume": CommandSource("steer", "resume", "changes"),
    "cancel": CommandSource("steer", "cancel", "changes"),
    "stacks": CommandSource("ranks", "stacks", "changes"),
    "serve": CommandSource("serve", "serve"),
    "docs": CommandSource("docs", "docs"),
    "launch": CommandSource("launch", "launch", cls="LaunchCommand"),
    "test": CommandSource("selftest", "selftest"),
    "estimate-memory": CommandSource("estimate_memory", "estimate_memory"),
    "answer": CommandSource("remote.server", "answer", hidden=True),
}
GROUPS: Mapping[str, str] = {
    "cluster": "Manage cluster profiles, probe clusters, and install hpcaccel on them.",
    "sweep": "Search hyperparameters: many trials of one job on an array of workers.",
    "checkpoint": "List, show, verify, convert and pin checkpoints.",
    "config": "Ask how `hpcaccel launch` starts ranks, and write the answers to Accelerate's default_config.yaml.",
}
"""Groups of commands, each with its help: the ``app`` of the module of ``hpcaccel.cli`` with the same name."""

NOT_OURS: Mapping[str, str] = {
    "merge-weights": "`hpcaccel checkpoint convert SRC DST --to safetensors` merges a sharded checkpoint's weights",
}
"""Accelerate's commands that hpcaccel does not have, each with what to use instead."""
