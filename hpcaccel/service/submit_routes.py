"""Routes that take a spec: submit, check, render, plan; and the schema of specs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

import hpcaccel
from hpcaccel.core.run_dir import RunDir, default_runs_dir
from hpcaccel.errors import SpecError, UserError
from hpcaccel.render import render as render_script
from hpcaccel.service.answers import ERRORS, JsonAnswer
from hpcaccel.service.behind_ssh.remote_submission import plan_there, render_there, submit_there, variables_of
from hpcaccel.service.run_source import RunSource
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.service.spec_requests import SPEC_BODY, SpecRequest, any_spec, chosen_profile, job_spec, read_spec_request
from hpcaccel.spec import schema as job_schema
from hpcaccel.spec import spec_hash, sweep_schema
from hpcaccel.spec.cluster.cluster_facts import load_facts
from hpcaccel.submission.clusters.checks import findings_for, way_out
from hpcaccel.submission.clusters.plan import Choice, plan_choices
from hpcaccel.submission.runs.run_handle import AnyRun, open_run
from hpcaccel.submission.submit.api import advice_afterwards, submit_prepared
from hpcaccel.submission.submit.idempotent import once_or_always
from hpcaccel.submission.submit.prepare import prepare

__all__ = ["SubmittedRun", "submit_routes"]

Asked = Annotated[SpecRequest, Depends(read_spec_request)]


class SubmittedRun(BaseModel):
    """A run or a sweep that was submitted."""

    run_id: str
    name: str
    job_id: str
    path: str
    cluster: str
    tasks: int | None
    """Number of tasks of an array or workers of a sweep; null for a single run."""
    repeated: bool
    """Whether an earlier request with the same key has submitted it."""
    warnings: list[str]

    @classmethod
    def of(cls, run: AnyRun, *, repeated: bool = False, warnings: tuple[str, ...] = ()) -> SubmittedRun:
        record = run.record
        return cls(
            run_id=run.run_id, name=run.name, job_id=run.job_id, path=str(run.path), cluster=record.cluster,
            tasks=record.array_size, repeated=repeated, warnings=list(warnings),
        )  # fmt: skip

    def answer(self) -> JsonAnswer:
        return JsonAnswer(self.model_dump(), status_code=200 if self.repeated else 201)


class CheckedSpec(BaseModel):
    """A spec that passed all checks, with the values of its cluster and all defaults."""

    valid: bool
    hash: str
    spec: dict[str, Any]
    warnings: list[str]
    facts_age_seconds: float | None
    """Age of the stored facts about the cluster; null if there are none."""


SUBMITTED: dict[int | str, dict[str, Any]] = {
    200: {"model": SubmittedRun, "description": "An earlier request with the same key has submitted it."},
    201: {"model": SubmittedRun, "description": "Submitted."},
}


def submit_routes(source: RunSource, settings: ServiceSettings) -> APIRouter:
    """The routes that take a spec."""
    routes = APIRouter(tags=["submit"], responses=ERRORS)

    @routes.post("/runs", status_code=201, responses=SUBMITTED, openapi_extra=SPEC_BODY)
    def submit(asked: Asked) -> JsonAnswer:
        """Submit a spec. With an idempotency key, a repeated request returns the run of the first one."""
        there = source.remote.commands(chosen_profile(asked.cluster))
        if there is None:
            submitted = _submit(asked, settings)
        else:
            submitted = SubmittedRun(**asdict(submit_there(there, asked, settings, is_sweep=False)))
        source.changed()
        return submitted.answer()

    @routes.post("/check", response_model=CheckedSpec, openapi_extra=SPEC_BODY)
    def check(asked: Asked) -> JsonAnswer:
        """Check a spec, also against the stored facts about the cluster. Nothing is submitted."""
        with variables_of(source.remote.commands(chosen_profile(asked.cluster)), asked):
            return JsonAnswer(_check(asked, settings).model_dump())

    @routes.post("/render", response_class=PlainTextResponse, openapi_extra=SPEC_BODY)
    def render(asked: Asked) -> PlainTextResponse:
        """The batch script that would be submitted."""
        there = source.remote.commands(chosen_profile(asked.cluster))
        return PlainTextResponse(_render(asked, settings) if there is None else render_there(there, asked, settings))

    @routes.post("/plan", response_model=list[Choice], openapi_extra=SPEC_BODY)
    def plan(asked: Asked) -> JsonAnswer:
        """Compare the expected start and the GPU-hours across partitions and node counts. Nothing is submitted."""
        profile = chosen_profile(asked.cluster)
        if profile is not None and profile.backend == "local":
            raise UserError("the local backend has no queue: a job starts immediately. Choose another cluster")
        if (there := source.remote.commands(profile)) is not None:
            return JsonAnswer(plan_there(there, asked, settings))
        facts = None if profile is None else load_facts(profile.name)
        spec = any_spec(asked, settings)
        choices = plan_choices(spec, partitions=asked.partitions, nodes=asked.nodes, profile=profile, facts=facts)
        return JsonAnswer([choice.to_json() for choice in choices])

    @routes.get("/schema", response_model=dict[str, Any])
    def schema(sweep: Annotated[bool, Query(description="The schema of specs with a sweep section.")] = False) -> Any:
        """The JSON Schema of specs."""
        return JsonAnswer(sweep_schema() if sweep else job_schema())

    return routes


def _submit(asked: SpecRequest, settings: ServiceSettings) -> SubmittedRun:
    with once_or_always(asked.idempotency_key) as once:
        if (earlier := once.earlier()) is not None:
            return SubmittedRun.of(open_run(earlier), repeated=True)
        prepared = prepare(
            job_spec(asked, settings),
            cluster=asked.cluster,
            runs_dir=settings.runs_dir,
            grid=asked.grid or None,
            from_run=asked.from_run,
            after=asked.after,
            slurm=once.slurm,
        )
        run = submit_prepared(prepared, once=None if asked.idempotency_key is None else once)
    return SubmittedRun.of(run, warnings=(*prepared.advice, *advice_afterwards(prepared, run)))


def _check(asked: SpecRequest, settings: ServiceSettings) -> CheckedSpec:
    profile = chosen_profile(asked.cluster)
    spec = any_spec(asked, settings)
    warnings: list[str] = []
    age = None
    if profile is not None and profile.backend == "slurm":
        facts, found = findings_for(spec, profile)
        if facts is not None:
            if wrong := [str(one) for one in found if one.is_error]:
                raise SpecError(wrong, hints=[way_out(facts, can_leave_aside=False)])
            warnings, age = [str(one) for one in found], facts.age_seconds()
    values = spec.model_dump(mode="json")
    return CheckedSpec(valid=True, hash=spec_hash(spec), spec=values, warnings=warnings, facts_age_seconds=age)


def _render(asked: SpecRequest, settings: ServiceSettings) -> str:
    profile = chosen_profile(asked.cluster)
    spec = any_spec(asked, settings)
    base = settings.runs_dir or default_runs_dir(profile.runs_dir if profile else None)
    return render_script(
        spec,
        run_dir=RunDir(base / spec.name / "RUN_ID"),
        python=sys.executable,
        profile=profile,
        backend=profile.backend if profile is not None else "slurm",
        header={"spec": spec_hash(spec), "hpcaccel": hpcaccel.__version__},
    )
