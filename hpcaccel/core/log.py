"""Logging of the batch step: the handler of the logger ``hpcaccel`` and its outputs; and masking of secrets in texts.

Modules use ``logging.getLogger(__name__)`` and attach no handlers (except the runtime, for the training log), so a
program that imports hpcaccel configures these loggers like those of any library. The program ``node.pyz`` calls
``configure``, which adds one handler to the logger ``hpcaccel``. The handler writes each message

- to standard output, which Slurm appends to ``slurm.log``: ``hpcaccel: 2026-11-20T15:30:12 message``;
- to the log of the current attempt or sweep worker, if one is set: ``2026-11-20T15:30:12 message``.

Values of ``environment.secrets`` are masked in both. If the disk is full, messages are lost, but the run continues.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.run_dir import RunDir

__all__ = ["LEVEL", "MASKED", "Mask", "NodeHandler", "configure", "log_always", "set_log_file", "set_mask"]

LEVEL = "HPCACCEL_LOG_LEVEL"
"""Environment variable: the lowest level logged, as a name (``debug``) or a number. Default: ``info``."""
_TREE = "hpcaccel"

MASKED = "***"
SHORTEST = 4
"""Minimum length in characters of a masked value. Shorter values also occur in ordinary words."""
SHORTEST_LINE = 8
"""Each line of a multi-line value is masked too if it has at least this many characters."""


class NodeHandler(logging.Handler):
    """Writes messages to standard output and to the current log file.

    Args:
        to_stderr: write to standard error instead, for programs whose standard output carries data.
    """

    def __init__(self, *, to_stderr: bool = False) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"))
        self.file: Path | None = None
        self.mask: Callable[[str], str] = str
        self._to_stderr = to_stderr

    def emit(self, record: logging.LogRecord) -> None:
        line = self.mask(self.format(record))
        self._print(line)
        if self.file is None:
            return
        try:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            self._print(f"cannot write {self.file}: {error.strerror}")

    def _print(self, line: str) -> None:
        try:
            print(f"hpcaccel: {line}", file=sys.stderr if self._to_stderr else sys.stdout, flush=True)
        except OSError:
            pass  # the disk with the job's output is full; the line stays in the stream's buffer


def configure(*, to_stderr: bool = False) -> None:
    """Configure the loggers ``hpcaccel.*`` of this process as described in the module's docstring.

    A level that the program has set on the logger ``hpcaccel`` stays, unless ``HPCACCEL_LOG_LEVEL`` is a valid level.
    Other loggers and their handlers do not change, and messages still propagate to the root logger.
    """
    tree = logging.getLogger(_TREE)
    for handler in _handlers():
        tree.removeHandler(handler)
    tree.addHandler(NodeHandler(to_stderr=to_stderr))
    wanted = os.environ.get(LEVEL, "").strip().upper()
    level = int(wanted) if wanted.isdecimal() else logging.getLevelName(wanted)
    if wanted and isinstance(level, int):
        tree.setLevel(level)
        return
    if tree.level == logging.NOTSET:
        tree.setLevel(logging.INFO)
    if wanted:
        known = ", ".join(name.lower() for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"))
        tree.warning("%s=%s is not a log level (allowed: %s, or a number): ignored", LEVEL, os.environ[LEVEL], known)


def set_log_file(path: Path | None) -> None:
    """Append later messages to the file ``path`` too, in place of the previous file. With None, write to no file."""
    for handler in _handlers():
        handler.file = path


def set_mask(mask: Callable[[str], str]) -> None:
    """Pass every later message through ``mask``, which replaces secret values."""
    for handler in _handlers():
        handler.mask = mask


def log_always(logger: logging.Logger, message: str) -> None:
    """Log at level INFO regardless of the loggers' levels: for lines that programs parse, such as an attempt's first
    line."""
    logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, message, (), None))


def _handlers() -> list[NodeHandler]:
    return [handler for handler in logging.getLogger(_TREE).handlers if isinstance(handler, NodeHandler)]


class Mask:
    """Replaces secret values in a text by ``***``.

    Args:
        values: the secrets.
    """

    def __init__(self, values: Iterable[str]) -> None:
        whole = {value.strip() for value in values}
        lines = {line.strip() for value in whole if "\n" in value for line in value.splitlines()}
        parts = [value for value in whole if len(value) >= SHORTEST]
        parts += [line for line in lines if len(line) >= SHORTEST_LINE]
        found = sorted(parts, key=len, reverse=True)
        self._parts = found
        self._pattern = re.compile("|".join(map(re.escape, found))) if found else None

    @classmethod
    def of(cls, run: RunDir, env: Mapping[str, str] = os.environ) -> Mask:
        """The mask of a run. Its spec names the variables that hold secrets; their values are taken from ``env``."""
        spec = (read_json(run.spec) or {}).get("spec", {})
        names = (spec.get("environment") or {}).get("secrets") or []
        return cls(env[name] for name in names if name in env)

    def __call__(self, text: str) -> str:
        if self._pattern is None:
            return text
        text = self._pattern.sub(MASKED, text)
        # Truncated text may end in the middle of a value.
        for part in self._parts:
            for length in range(len(part) - 1, SHORTEST - 1, -1):
                if text.endswith(part[:length]):
                    return text[:-length] + MASKED
        return text
