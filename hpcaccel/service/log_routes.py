"""Routes for the logs of a run: which there are, a range of one, and one as it grows (server-sent events)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from hpcaccel.core.run_dir import RunDir, numbered_folders
from hpcaccel.errors import RunNotFound
from hpcaccel.service.answers import ERRORS, JsonAnswer
from hpcaccel.service.run_routes import RunId
from hpcaccel.service.run_source import RunSource
from hpcaccel.submission.runs.status import ACTIVE

__all__ = ["log_routes"]

MOST_BYTES = 512 << 10
"""Largest range of one answer."""
PART_BYTES = 64 << 10
"""Bytes that a stream reads at a time: as much as one slow client keeps in memory."""
POLL_SECONDS = 1.0
BEAT_SECONDS = 15.0
"""A comment is sent this often, so that proxies keep the connection and a disconnected client is noticed."""
STATUS_SECONDS = 5.0
_RANK_LOG = re.compile(r"([1-9][0-9]{0,5})/([0-9]{1,6})\.log")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.log")


class LogFile(BaseModel):
    """A log file of a run."""

    name: str
    bytes: int


class LogPart(BaseModel):
    """A range of a log file. Bytes that are not UTF-8 are replaced."""

    name: str
    text: str
    offset: int
    """Where the range begins, in bytes."""
    next_offset: int
    """Where the next range begins."""
    size: int
    """Size of the file when it was read."""


LogName = Annotated[str, Query(description="A name from the list of logs, such as 1/0.log.")]


def log_routes(source: RunSource) -> APIRouter:
    """The routes below ``/runs/{run_id}/logs``."""
    routes = APIRouter(tags=["logs"], responses=ERRORS)

    @routes.get("/runs/{run_id}/logs", response_model=list[LogFile])
    def logs(run_id: RunId) -> JsonAnswer:
        """The log files: of the batch script, and of each attempt's ranks and supervisor."""
        found = log_files(source.find(run_id).dir)
        return JsonAnswer([{"name": name, "bytes": path.stat().st_size} for name, path in found.items()])

    @routes.get("/runs/{run_id}/logs/{name:path}/stream", response_class=StreamingResponse, responses=_STREAM)
    async def stream(
        run_id: RunId,
        name: str,
        request: Request,
        offset: Annotated[
            int, Query(description="Where to begin; negative: from the end.", ge=-(1 << 53), le=1 << 53)
        ] = 0,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> StreamingResponse:
        """The log as it grows: events ``log`` with JSON (text, next_offset), then ``end`` when the run has ended.

        The id of an event is the next offset: a browser that reconnects goes on there. While the run is active, the
        log of a rank that has not begun is waited for.
        """
        path = await anyio.to_thread.run_sync(_log_to_come, source, run_id, name)
        last = last_event_id or ""
        begin = int(last) if last.isdecimal() and len(last) < 18 else offset
        follower = _Follower(source, run_id, path, max(0, begin) if begin >= 0 else begin)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(follower.events(request), media_type="text/event-stream", headers=headers)

    @routes.get("/runs/{run_id}/logs/{name:path}", response_model=LogPart)
    def log(
        run_id: RunId,
        name: str,
        offset: Annotated[
            int, Query(description="Where to begin; negative: from the end.", ge=-(1 << 53), le=1 << 53)
        ] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_BYTES)] = PART_BYTES,
    ) -> JsonAnswer:
        """A range of a log."""
        return JsonAnswer(read_part(_log(source, run_id, name), name, offset, limit).model_dump())

    return routes


_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events.", "content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


def log_files(run: RunDir) -> dict[str, Path]:
    """The log files of a run by name. Links are left out: a rank could link to any file."""
    found = {run.slurm_log.name: run.slurm_log}
    for attempt in numbered_folders(run.attempts):
        folder = run.attempt(attempt)
        names = sorted((entry.name for entry in os.scandir(folder) if _NAME.fullmatch(entry.name)), key=_order)
        found |= {f"{attempt}/{name}": folder / name for name in names}
    return {name: path for name, path in found.items() if path.is_file() and not path.is_symlink()}


def _order(name: str) -> tuple[bool, int, str]:
    stem = name.removesuffix(".log")
    return (not stem.isdecimal(), int(stem) if stem.isdecimal() else 0, name)


def _log(source: RunSource, token: str, name: str) -> Path:
    run = source.find(token).dir
    path = log_files(run).get(name)
    if path is None:
        raise RunNotFound(f"run {run.run_id} has no log {name[:80]!r}")
    return path


def _log_to_come(source: RunSource, token: str, name: str) -> Path:
    """The path of a log, or the one that a rank of an active run will write.

    Raises:
        RunNotFound: there is no such run, or no such log.
    """
    try:
        return _log(source, token, name)
    except RunNotFound:
        rank_log = _RANK_LOG.fullmatch(name)
        if rank_log is None or source.overview(token).state not in ACTIVE:
            raise
        path = source.find(token).dir.rank_log(int(rank_log[1]), int(rank_log[2]))
        if path.is_symlink():
            raise
        return path


def read_part(path: Path, name: str, offset: int, limit: int) -> LogPart:
    """Read at most ``limit`` bytes. A character that is cut at the end is left for the next range."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = min(offset, size) if offset >= 0 else max(0, size + offset)
        file.seek(begin)
        data = file.read(limit)
    cut = _unfinished(data) if begin + len(data) < size or len(data) == limit else 0
    data = data[: len(data) - cut] if cut < len(data) else data
    return LogPart(
        name=name, text=data.decode(errors="replace"), offset=begin, next_offset=begin + len(data), size=size
    )


def _unfinished(data: bytes) -> int:
    """Number of bytes at the end of ``data`` that begin a UTF-8 character without completing it."""
    for length in range(1, min(3, len(data)) + 1):
        byte = data[-length]
        if byte >= 0xC0:
            return length if length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0


@dataclass
class _Follower:
    """Reads a growing log for one client: the next part is read when the client has taken the last one."""

    source: RunSource
    token: str
    path: Path
    offset: int

    async def events(self, request: Request) -> AsyncIterator[bytes]:
        quiet = since_status = 0.0
        ended = False
        while True:
            part = await anyio.to_thread.run_sync(self._read, self.offset)
            if part.size < part.offset:
                part = await anyio.to_thread.run_sync(self._read, 0)
            self.offset = part.next_offset
            if part.text:
                quiet = 0.0
                data = json.dumps({"text": part.text, "next_offset": part.next_offset})
                yield f"id: {part.next_offset}\nevent: log\ndata: {data}\n\n".encode()
                if part.next_offset < part.size:
                    continue
            elif ended:
                yield f"id: {self.offset}\nevent: end\ndata: {{}}\n\n".encode()
                return
            if await request.is_disconnected():
                return
            if since_status >= STATUS_SECONDS or since_status == 0.0:
                ended = await anyio.to_thread.run_sync(self._ended)  # then the log is read once more
                since_status = 0.0
                if ended:
                    continue
            if quiet >= BEAT_SECONDS:
                quiet = 0.0
                yield b": waiting\n\n"
            await anyio.sleep(POLL_SECONDS)
            quiet += POLL_SECONDS
            since_status += POLL_SECONDS

    def _read(self, offset: int) -> LogPart:
        if not self.path.exists() or self.path.is_symlink():  # the rank has not begun
            return LogPart(name="", text="", offset=offset, next_offset=offset, size=max(0, offset))
        return read_part(self.path, "", offset, PART_BYTES)

    def _ended(self) -> bool:
        try:
            return self.source.overview(self.token).state not in ACTIVE
        except RunNotFound:
            return True
