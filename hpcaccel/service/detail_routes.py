"""Routes that show what happened in a run: metrics, the merged log, the first traceback, the profiler's traces,
the changes since the last run of its name."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel

from hpcaccel.errors import RunNotFound
from hpcaccel.service.answers import ERRORS, JsonAnswer
from hpcaccel.service.run_readings import MOST_BUCKETS
from hpcaccel.service.run_routes import RunId
from hpcaccel.service.run_source import RunSource
from hpcaccel.view.merged_log import LogLine
from hpcaccel.view.metric_buckets import Bucket
from hpcaccel.view.profile_traces import Profile, trace_path

__all__ = ["detail_routes"]


class FirstTraceback(BaseModel):
    """The rank at fault, or else the lowest rank with a traceback, and the traceback; both null if there is none."""

    rank: int | None
    text: str | None


_TRACE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", "content": {"application/gzip": {"schema": {"type": "string"}}}}
}


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
        """The rank at fault in the last attempt that ended, and its traceback."""
        return JsonAnswer(source.read(run_id, "traceback"))

    @routes.get("/runs/{run_id}/profiles", response_model=list[Profile])
    def traces(run_id: RunId) -> JsonAnswer:
        """The traces of torch's profiler, oldest first."""
        return JsonAnswer(source.read(run_id, "profiles"))

    @routes.get("/runs/{run_id}/profiles/{name:path}", response_class=FileResponse, responses=_TRACE)
    def trace(run_id: RunId, name: str) -> Response:
        """A trace: Chrome's JSON, compressed, for ui.perfetto.dev."""
        if (pieces := source.trace_there(run_id, name)) is not None:
            file = f"{run_id}-{name}".replace("/", "-").replace(":", "-")
            headers = {"Content-Disposition": f'attachment; filename="{file}"'}
            return StreamingResponse(pieces, media_type="application/gzip", headers=headers)
        run = source.find(run_id).dir
        path = trace_path(run, name)
        if path is None:
            raise RunNotFound(f"run {run.run_id} has no trace {name[:80]!r}")
        return FileResponse(path, media_type="application/gzip", filename=f"{run.run_id}-{name.replace('/', '-')}")

    @routes.get("/runs/{run_id}/diff", response_class=PlainTextResponse)
    def diff(run_id: RunId) -> PlainTextResponse:
        """The changes of settings and code since the previous run of this name; empty for the first one."""
        return PlainTextResponse(source.read(run_id, "diff"))

    return routes
