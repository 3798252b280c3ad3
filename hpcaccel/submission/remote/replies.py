"""The other side: replies that are kept, so that a request which is repeated is not carried out twice.

A request has an id. While it is carried out, another one with the same id waits; afterwards it gets the same reply.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import read_json, write_json
from hpcaccel.errors import UserError
from hpcaccel.submission.locks import forget_old, give_back, take
from hpcaccel.submission.remote.remote_index import state_folder

__all__ = ["Collector", "Reply", "kept"]

KEPT_SECONDS = 7 * 86_400


class Collector:
    """Takes frames and keeps what they carry."""

    def __init__(self) -> None:
        self.out = b""
        self.err = b""

    def send(self, frame: str, payload: bytes = b"", **values: Any) -> None:
        if frame == "out":
            self.out += payload
        else:
            self.err += payload


class Reply:
    """How a request ended; ``code`` is None before that."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        said = None if file is None else read_json(file)
        self.code: int | None = None if said is None else int(said["code"])
        self.out = b"" if said is None else base64.b64decode(said["out"])
        self.err = b"" if said is None else base64.b64decode(said["err"])

    def keep(self, code: int, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out, err
        if self._file is not None:
            texts = {"out": base64.b64encode(out).decode(), "err": base64.b64encode(err).decode()}
            try:
                write_json(self._file, {"code": code, **texts}, mode=0o600)
            except OSError as error:  # it is done all the same, and this connection can still say so
                self.err += f"warning: the answer cannot be kept on the cluster: {error.strerror}\n".encode()


@contextmanager
def kept(name: str | None) -> Iterator[Reply]:
    """The reply to the request ``name``, which nobody else carries out meanwhile; None: one that may be repeated."""
    if name is None:
        yield Reply(None)
        return
    if not re.fullmatch(r"[0-9a-f]{32}", name):
        raise UserError(f"{name!r} is no id of a request")
    folder = state_folder() / "replies"
    forget_old(folder, older_than_seconds=KEPT_SECONDS)
    file = folder / f"{name}.lock"
    lock = take(file, what="carries out the same request")
    try:
        yield Reply(folder / f"{name}.json")
    finally:
        give_back(file, lock)
