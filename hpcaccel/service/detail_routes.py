"""Routes that show what happened in a run: metrics, the merged log, the first traceback, the changes since the last
run of its name."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from hpcaccel.service.answers import ERRORS, JsonAnswer
from hpcaccel.service.run_readings import MOST_BUCKETS
from hpcaccel.service.run_routes import RunId
from hpcaccel.service.run_source import RunSource
from hpcaccel.view.merged_log import LogLine
from hpcaccel.view.metric_buckets import Bucket

__all__ = ["detail_routes"]


class FirstTraceback(BaseModel):
    """The traceback of the rank that failed first; both are null if there is none."""

    rank: int | None
    text: str | None


def detail_routes(source: RunSource) -> APIRouter:
    """Further routes below ``/runs/{run_id}``."""
    routes = APIRouter(tags=["runs"], responses=ERRORS)

    @routes.get("/runs/{run_id}/metric-names", response_model=list[str])
    def names(run_id: RunId) -> JsonAnswer:
        """The names of all metrics that the run has logged."""
        return JsonAnswer(source.read(run_id, "metric-names"))

    @routes.get("/runs/{run_id}/metrics", response_model=dict[str, list[Bucket]])
    def metrics(
        run_id: RunId,
        names: Annotated[list[str] | None, Query(max_length=100, description="Repeated; default: loss.")] = None,
        buckets: Annotated[int, Query(ge=1, le=MOST_BUCKETS, description="Maximum number of buckets.")] = 500,
    ) -> JsonAnswer:
        """Curves: minimum, maximum and mean in each bucket of steps.

        One line across all attempts: for a step that was repeated, the value of the newest attempt.
        """
        return JsonAnswer(source.read(run_id, "metrics", names=names or ["loss"], buckets=buckets))

    @routes.get("/runs/{run_id}/merged-log", response_model=list[LogLine])
    def merged(
        run_id: RunId,
        attempt: Annotated[int | None, Query(ge=1, le=1_000_000, description="Default: the newest.")] = None,
        limit: Annotated[int, Query(ge=1, le=20_000, description="Maximum number of lines.")] = 1000,
    ) -> JsonAnswer:
        """The newest lines of the ranks and the supervisor of an attempt, with equal lines of several ranks joined."""
        return JsonAnswer(source.read(run_id, "merged-log", attempt=attempt, limit=limit))

    @routes.get("/runs/{run_id}/traceback", response_model=FirstTraceback)
    def traceback(run_id: RunId) -> JsonAnswer:
        """The traceback of the rank that failed first."""
        return JsonAnswer(source.read(run_id, "traceback"))

    @routes.get("/runs/{run_id}/diff", response_class=PlainTextResponse)
    def diff(run_id: RunId) -> PlainTextResponse:
        """The changes of settings and code since the previous run of this name; empty for the first one."""
        return PlainTextResponse(source.read(run_id, "diff"))

    return routes
