"""JSON objects over a pipe, one per line: between a sweep worker and its tuner, or a rank and its writer process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["LineSplitter", "json_line", "objects_in", "write_all"]


class LineSplitter:
    """Splits data read from a pipe into whole lines and buffers the unfinished last one."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that ``piece`` completes, without their newline."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return lines


def json_line(value: Mapping[str, Any]) -> bytes:
    """``value`` as one line."""
    return json.dumps(value).encode() + b"\n"


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, in several writes if needed.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def objects_in(output: str | bytes, *, keys: frozenset[str] | set[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects in a job step's output, one per line, that have all of ``keys``. Other lines, such as those of
    login scripts, are skipped."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and keys <= value.keys():
            yield value
