"""Routes that show runs: the list, one run, its files, ledger, metrics, checkpoints and differences."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import BaseModel

from hpcaccel.service.answers import ERRORS, JsonAnswer
from hpcaccel.service.run_source import RunSource
from hpcaccel.view.run_overview import Overview, RunRow

__all__ = ["RunId", "run_routes"]

PIECE_CHARACTERS = 64 << 10

RunId = Annotated[
    str, Path(description="A run id, the name of a run (its latest), a unique prefix of an id, or a job id.")
]
Sort = Literal[
    "created", "name", "state", "job_id", "attempts", "step", "last_loss", "run_id",
    "-created", "-name", "-state", "-job_id", "-attempts", "-step", "-last_loss", "-run_id",
]  # fmt: skip


class RunList(BaseModel):
    """A page of the list of runs."""

    runs: list[Overview]
    total: int
    """Number of all runs that match."""


def run_routes(source: RunSource) -> APIRouter:
    """The routes below ``/runs`` that only read."""
    routes = APIRouter(tags=["runs"], responses=ERRORS)

    @routes.get("/runs", response_model=RunList)
    def runs(
        state: Annotated[str, Query(description="States, separated by commas; empty for all.")] = "",
        name: Annotated[str, Query(description="Part of the name or id.")] = "",
        sort: Sort = "-created",
        limit: Annotated[int, Query(ge=1, le=20_000)] = 50,
        offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
    ) -> StreamingResponse:
        """List the runs of this user, newest first."""
        states = [part for part in state.split(",") if part]
        rows, total = source.rows(states=states, name=name, sort=sort, limit=limit, offset=offset)
        return StreamingResponse(_pieces("runs", rows, total), media_type="application/json")

    @routes.get("/runs/{run_id}", response_model=Overview)
    def run(run_id: RunId) -> JsonAnswer:
        """The overview of a run."""
        return JsonAnswer(source.overview(run_id).to_json())

    @routes.get("/runs/{run_id}/script", response_class=PlainTextResponse)
    def script(run_id: RunId) -> PlainTextResponse:
        """The batch script."""
        return PlainTextResponse(source.read(run_id, "script"))

    @routes.get("/runs/{run_id}/spec", response_class=PlainTextResponse)
    def spec(run_id: RunId) -> PlainTextResponse:
        """The spec as YAML, with all values that were set."""
        return PlainTextResponse(source.read(run_id, "spec"))

    @routes.get("/runs/{run_id}/ledger", response_model=list[dict[str, Any]])
    def ledger(run_id: RunId) -> JsonAnswer:
        """The lines of the ledger: one when an attempt starts, and one when it ends."""
        return JsonAnswer(source.read(run_id, "ledger"))

    @routes.get("/runs/{run_id}/checkpoints", response_model=list[dict[str, Any]])
    def checkpoints(run_id: RunId) -> JsonAnswer:
        """The checkpoints, oldest first. Manifests and sizes are checked."""
        return JsonAnswer(source.read(run_id, "checkpoints"))

    return routes


async def _pieces(key: str, rows: Sequence[RunRow], total: int) -> AsyncIterator[bytes]:
    """The page as JSON, piece by piece: the rows are shared, and a slow client holds only one piece."""
    piece = f'{{"total":{total},"{key}":['
    for number, row in enumerate(rows):
        piece += ("," if number else "") + row.document
        if len(piece) > PIECE_CHARACTERS:
            yield piece.encode(errors="replace")
            piece = ""
    yield f"{piece}]}}".encode(errors="replace")
