"""Routes for the logs of a run: which there are, a range of one, and one as it grows (server-sent events)."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from hpcaccel.errors import RunNotFound
from hpcaccel.service.answers import ERRORS, JsonAnswer
from hpcaccel.service.log_parts import MOST_BYTES, PART_BYTES, LogPart, log_path, read_part
from hpcaccel.service.run_routes import RunId
from hpcaccel.service.run_source import RunSource
from hpcaccel.submission.runs.status import ACTIVE

__all__ = ["log_routes"]

POLL_SECONDS = 1.0
BEAT_SECONDS = 15.0
"""A comment is sent this often, so that proxies keep the connection and a disconnected client is noticed."""
STATUS_SECONDS = 5.0
_RANK_LOG = re.compile(r"([1-9][0-9]{0,5})/([0-9]{1,6})\.log")


class LogFile(BaseModel):
    """A log file of a run."""

    name: str
    bytes: int


LogName = Annotated[str, Query(description="A name from the list of logs, such as 1/0.log.")]


def log_routes(source: RunSource) -> APIRouter:
    """The routes below ``/runs/{run_id}/logs``."""
    routes = APIRouter(tags=["logs"], responses=ERRORS)

    @routes.get("/runs/{run_id}/logs", response_model=list[LogFile])
    def logs(run_id: RunId) -> JsonAnswer:
        """The log files: of the batch script, and of each attempt's ranks and supervisor."""
        return JsonAnswer(source.read(run_id, "logs"))

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
        read = await anyio.to_thread.run_sync(_reader, source, run_id, name)
        last = last_event_id or ""
        begin = int(last) if last.isdecimal() and len(last) < 18 else offset
        follower = _Follower(source, run_id, read, max(0, begin) if begin >= 0 else begin)
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
        return JsonAnswer(source.read(run_id, "log", name=name, offset=offset, limit=limit))

    return routes


_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events.", "content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


def _reader(source: RunSource, token: str, name: str) -> Callable[[int, int], LogPart]:
    """A function that reads ranges of a log, which a rank of an active run may not have created yet.

    Raises:
        RunNotFound: there is no such run, or no such log.
    """
    is_there = source.is_there(token)
    path = None if is_there else _path_to_come(source, token, name)

    def read(offset: int, limit: int) -> LogPart:
        try:
            if path is None:
                return LogPart(**source.read(token, "log", name=name, offset=offset, limit=limit))
            if path.exists() and not path.is_symlink():
                return read_part(path, name, offset, limit)
        except RunNotFound:
            if not _may_come(source, token, name):
                raise
        return LogPart(name, "", offset, offset, max(0, offset))  # the rank has not begun

    if is_there:
        read(0, 1)
    return read


def _path_to_come(source: RunSource, token: str, name: str) -> Path:
    run = source.find(token).dir
    try:
        return log_path(run, name)
    except RunNotFound:
        rank_log = _RANK_LOG.fullmatch(name)
        if rank_log is None or not _may_come(source, token, name):
            raise
        path = run.rank_log(int(rank_log[1]), int(rank_log[2]))
        if path.is_symlink():
            raise
        return path


def _may_come(source: RunSource, token: str, name: str) -> bool:
    """Whether a rank of an active run may still write this log."""
    return _RANK_LOG.fullmatch(name) is not None and source.overview(token).state in ACTIVE


@dataclass
class _Follower:
    """Reads a growing log for one client: the next part is read when the client has taken the last one."""

    source: RunSource
    token: str
    read: Callable[[int, int], LogPart]
    """Reads a range from an offset, of at most so many bytes."""
    offset: int

    async def events(self, request: Request) -> AsyncIterator[bytes]:
        quiet = since_status = 0.0
        ended = False
        while True:
            part = await anyio.to_thread.run_sync(self.read, self.offset, PART_BYTES)
            if part.size < part.offset:
                part = await anyio.to_thread.run_sync(self.read, 0, PART_BYTES)
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

    def _ended(self) -> bool:
        try:
            return self.source.overview(self.token).state not in ACTIVE
        except RunNotFound:
            return True
