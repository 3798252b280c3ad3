"""Routes for sweeps: the list, one sweep, its trials, the best spec; start, stop, cancel, resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from hpcaccel.service.action_routes import ActionAnswer, accepted
from hpcaccel.service.answers import ERRORS, JsonAnswer
from hpcaccel.service.behind_ssh.remote_submission import submit_there
from hpcaccel.service.behind_ssh.steered_runs import RemoteSweep
from hpcaccel.service.run_routes import RunId
from hpcaccel.service.run_source import RunSource
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.service.spec_requests import SPEC_BODY, SpecRequest, chosen_profile, read_spec_request, sweep_spec
from hpcaccel.service.submit_routes import SUBMITTED, SubmittedRun
from hpcaccel.submission.runs.run_handle import open_run
from hpcaccel.submission.submit.idempotent import once_or_always
from hpcaccel.sweeps.start_sweep import advice_afterwards, prepare_sweep, start_sweep
from hpcaccel.sweeps.sweep_handle import Sweep
from hpcaccel.view.run_overview import Overview
from hpcaccel.view.sweep_view import SweepView

__all__ = ["sweep_routes"]


class SweepList(BaseModel):
    """A page of the list of sweeps."""

    sweeps: list[Overview]
    total: int


class ResumeBody(BaseModel):
    """Changes to the sweep."""

    overrides: list[str] = Field(default_factory=list, max_length=1000)


def sweep_routes(source: RunSource, settings: ServiceSettings) -> APIRouter:
    """The routes below ``/sweeps``."""
    routes = APIRouter(tags=["sweeps"], responses=ERRORS)

    @routes.get("/sweeps", response_model=SweepList)
    def sweeps(
        limit: Annotated[int, Query(ge=1, le=1000)] = 50, offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0
    ) -> JsonAnswer:
        """List the sweeps of this user, newest first."""
        found, total = source.sweeps(limit=limit, offset=offset)
        return JsonAnswer({"sweeps": [row.to_json() for row in found], "total": total})

    @routes.get("/sweeps/{run_id}", response_model=SweepView)
    def sweep(
        run_id: RunId, rows: Annotated[bool, Query(description="Whether to include the row of each trial.")] = True
    ) -> JsonAnswer:
        """A sweep: trials, the best so far, workers, budget, rungs, curves, importances."""
        return JsonAnswer(source.read(run_id, "sweep", rows=rows))

    @routes.get("/sweeps/{run_id}/trials", response_model=list[dict[str, Any]])
    def trials(run_id: RunId) -> JsonAnswer:
        """A row for each trial: state, metrics, parameters, steps, cost."""
        return JsonAnswer(source.read(run_id, "trials"))

    @routes.get("/sweeps/{run_id}/best", response_class=PlainTextResponse)
    def best(
        run_id: RunId,
        trial: Annotated[int | None, Query(ge=0, le=10_000_000)] = None,
        metric: Annotated[str | None, Query(max_length=200)] = None,
    ) -> PlainTextResponse:
        """The best trial (or the given one) as a spec in YAML."""
        return PlainTextResponse(source.read(run_id, "best", trial=trial, metric=metric))

    @routes.post("/sweeps", status_code=201, responses=SUBMITTED, openapi_extra=SPEC_BODY)
    def start(asked: Annotated[SpecRequest, Depends(read_spec_request)]) -> JsonAnswer:
        """Start a sweep: a spec with a section ``sweep``."""
        started = _start(source, asked, settings)
        source.changed()
        return started.answer()

    @routes.post("/sweeps/{run_id}/stop", status_code=202, response_model=ActionAnswer)
    def stop(run_id: RunId) -> JsonAnswer:
        """Let the trials save and stop; resume continues them."""
        return _steered(source, run_id, "stop", lambda sweep: sweep.stop())

    @routes.post("/sweeps/{run_id}/cancel", status_code=202, response_model=ActionAnswer)
    def cancel(run_id: RunId) -> JsonAnswer:
        """End the workers now; resume continues the trials from their checkpoints."""
        return _steered(source, run_id, "cancel", lambda sweep: sweep.cancel())

    @routes.post("/sweeps/{run_id}/resume", status_code=202, response_model=ActionAnswer)
    def resume(run_id: RunId, body: Annotated[ResumeBody | None, Body()] = None) -> JsonAnswer:
        """Continue the sweep with new workers; an override such as sweep.max_trials=200 allows more trials."""
        changes = [] if body is None else body.overrides
        return _steered(source, run_id, "resume", lambda sweep: sweep.resume(changes=changes))

    return routes


def _steered(source: RunSource, token: str, action: str, act: Callable[[Sweep | RemoteSweep], object]) -> JsonAnswer:
    sweep = source.steered_sweep(token)
    act(sweep)
    return accepted(source, open_run(sweep.path) if isinstance(sweep, Sweep) else sweep, action)


def _start(source: RunSource, asked: SpecRequest, settings: ServiceSettings) -> SubmittedRun:
    if (there := source.remote.commands(chosen_profile(asked.cluster))) is not None:
        return SubmittedRun(**asdict(submit_there(there, asked, settings, is_sweep=True)))
    key = asked.idempotency_key
    with once_or_always(key) as once:
        if (earlier := once.earlier()) is not None:
            return SubmittedRun.of(open_run(earlier), repeated=True)
        spec = sweep_spec(asked, settings)
        plan = prepare_sweep(spec, cluster=asked.cluster, runs_dir=settings.runs_dir, slurm=once.slurm)
        directory, arrays = start_sweep(plan, once=None if key is None else once)
    warnings = (*plan.advice, *advice_afterwards(plan, arrays))
    return SubmittedRun.of(open_run(directory.path), warnings=warnings)
