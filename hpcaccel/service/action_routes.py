"""Routes that change a run: stop, save, profile, cancel, resume."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Body, Header
from pydantic import BaseModel, Field

from hpcaccel.service.answers import ERRORS, JsonAnswer
from hpcaccel.service.behind_ssh.steered_runs import RemoteRun, RemoteSweep
from hpcaccel.service.run_routes import RunId
from hpcaccel.service.run_source import RunSource
from hpcaccel.service.spec_requests import KEY
from hpcaccel.submission.runs.control import named_requests
from hpcaccel.submission.runs.run_handle import AnyRun

__all__ = ["ActionAnswer", "accepted", "action_routes"]

Key = Annotated[
    str | None, Header(pattern=KEY, description="A repeated request with the same key has no second effect.")
]


class ActionAnswer(BaseModel):
    """An action that was accepted. The run follows a request when its ranks have agreed on a step."""

    run_id: str
    action: str
    job_id: str
    """The newest job of the run: after a resume, the new one."""


class StopRequestBody(BaseModel):
    """The action after the ranks have saved and stopped."""

    then: Literal["pause", "requeue", "finish"] = "pause"


class ProfileBody(BaseModel):
    """The steps and ranks to record."""

    steps: int = Field(default=5, ge=1, le=50)
    ranks: list[int] = Field(default=[0], min_length=1, max_length=16)


def accepted(source: RunSource, run: AnyRun | RemoteRun | RemoteSweep, action: str) -> JsonAnswer:
    """The answer to an action that was accepted."""
    source.changed()
    answer = ActionAnswer(run_id=run.run_id, action=action, job_id=run.job_id)
    return JsonAnswer(answer.model_dump(), status_code=202)


def action_routes(source: RunSource) -> APIRouter:
    """The routes ``POST /runs/{run_id}/ACTION``."""
    routes = APIRouter(tags=["actions"], responses=ERRORS)

    @routes.post("/runs/{run_id}/stop", status_code=202, response_model=ActionAnswer)
    def stop(
        run_id: RunId, body: Annotated[StopRequestBody | None, Body()] = None, idempotency_key: Key = None
    ) -> JsonAnswer:
        """Save and stop; then stay stopped (pause), return to the queue (requeue) or end (finish)."""
        run = source.steered(run_id)
        with named_requests(idempotency_key):
            run.stop("pause" if body is None else body.then)
        return accepted(source, run, "stop")

    @routes.post("/runs/{run_id}/save", status_code=202, response_model=ActionAnswer)
    def save(run_id: RunId) -> JsonAnswer:
        """Save a checkpoint now and continue."""
        run = source.steered(run_id)
        run.save()
        return accepted(source, run, "save")

    @routes.post("/runs/{run_id}/profile", status_code=202, response_model=ActionAnswer)
    def profile(run_id: RunId, body: Annotated[ProfileBody | None, Body()] = None) -> JsonAnswer:
        """Record the next steps of some ranks with torch's profiler, into the run directory, and continue."""
        asked = ProfileBody() if body is None else body
        run = source.steered(run_id)
        run.profile(steps=asked.steps, ranks=asked.ranks)
        return accepted(source, run, "profile")

    @routes.post("/runs/{run_id}/cancel", status_code=202, response_model=ActionAnswer)
    def cancel(run_id: RunId, idempotency_key: Key = None) -> JsonAnswer:
        """Cancel the run now, without a requeue. It can be resumed later."""
        run = source.steered(run_id)
        with named_requests(idempotency_key):
            run.cancel()
        return accepted(source, run, "cancel")

    @routes.post("/runs/{run_id}/resume", status_code=202, response_model=ActionAnswer)
    def resume(run_id: RunId) -> JsonAnswer:
        """Continue the run in a new job, from its newest checkpoint."""
        run = source.steered(run_id)
        run.resume()
        return accepted(source, run, "resume")

    return routes
