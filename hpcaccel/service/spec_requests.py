"""Requests that contain a spec: as JSON values, or as YAML text; loaded like a spec file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpcaccel.errors import SpecError
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.spec import (
    ClusterProfile,
    JobSpec,
    SweepSpec,
    load_profile,
    profile_names,
    spec_from_values,
    sweep_from_values,
)
from hpcaccel.spec.loading.expand import elsewhere
from hpcaccel.spec.loading.load import load_text
from hpcaccel.spec.sweep.sweep_file import load_sweep_text
from hpcaccel.spec.yaml12 import parse_yaml

__all__ = [
    "SPEC_BODY",
    "SpecRequest",
    "any_spec",
    "chosen_profile",
    "directory_of",
    "job_spec",
    "read_spec_request",
    "sweep_spec",
]

KEY = r"^[0-9A-Za-z_-]{8,64}$"
"""Pattern of keys; see ``submission.submit.idempotent``."""


class SpecRequest(BaseModel):
    """A spec, as ``spec`` (values) or ``yaml`` (text), and what to do with it."""

    model_config = ConfigDict(extra="forbid")

    spec: dict[str, Any] | None = Field(default=None, description="The spec's values.")
    yaml: str | None = Field(default=None, description="The spec as YAML text, in place of spec.")
    overrides: list[str] = Field(
        default_factory=list, max_length=1000, description="key.sub=value, as on the command line."
    )
    cluster: str | None = Field(
        default=None, max_length=64, description="A profile, slurm or local; null: the default."
    )
    directory: str | None = Field(
        default=None, description="Relative paths refer to this directory; null: where the service was started."
    )
    idempotency_key: str | None = Field(
        default=None, pattern=KEY, description="A repeated request with the same key submits nothing again."
    )

    grid: list[str] = Field(
        default_factory=list, max_length=100, description="key=a,b,c: an array of all combinations."
    )
    from_run: str | None = Field(default=None, description="RUN, RUN@STEP or a path: the checkpoint to start from.")
    after: list[str] = Field(default_factory=list, max_length=1000, description="Runs that must end first.")
    partitions: list[str] = Field(default_factory=list, max_length=100, description="For plan: partitions to compare.")
    nodes: list[str] = Field(default_factory=list, max_length=100, description="For plan: numbers of nodes to compare.")

    @model_validator(mode="after")
    def _one_spec(self) -> SpecRequest:
        if (self.spec is None) == (self.yaml is None):
            raise ValueError("give either spec (values) or yaml (text)")
        return self

    def text(self) -> str:
        """The spec as text."""
        return json.dumps(self.spec) if self.yaml is None else self.yaml


SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/SpecRequest"}},
            "application/yaml": {"schema": {"type": "string"}},
        },
    }
}
"""The body of these routes, for OpenAPI."""


async def read_spec_request(request: Request) -> SpecRequest:
    """The body: JSON, or YAML text with the key in the header ``Idempotency-Key`` and ``?cluster=``.

    Raises:
        RequestValidationError: the body has another form.
    """
    body = await request.body()
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    values: Any
    try:
        if kind == "application/json":
            values = json.loads(body)
        else:
            values = {"yaml": body.decode()}
            if (cluster := request.query_params.get("cluster")) is not None:
                values["cluster"] = cluster
        if isinstance(values, dict) and (key := request.headers.get("idempotency-key")) is not None:
            values.setdefault("idempotency_key", key)
        return SpecRequest.model_validate(values)
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from None
    except (ValueError, RecursionError) as error:
        message = f"not {'JSON' if kind == 'application/json' else 'UTF-8 text'}: {error}"
        raise RequestValidationError([{"type": "value_error", "loc": ("body",), "msg": message}]) from None


def chosen_profile(cluster: str | None) -> ClusterProfile | None:
    """The profile of a request; None for Slurm on this machine without a profile."""
    if cluster == "slurm" and cluster not in profile_names():
        return None
    return load_profile(cluster)


def directory_of(asked: SpecRequest, settings: ServiceSettings) -> Path:
    """The directory to which relative paths of a request's spec refer; SpecError if there is no such directory."""
    path = settings.directory if asked.directory is None else Path(asked.directory).expanduser()
    if not path.is_absolute() or "\0" in str(path) or not path.is_dir():
        raise SpecError(f"directory {str(path)!r} is not the absolute path of a directory on the service's machine")
    return path


def job_spec(asked: SpecRequest, settings: ServiceSettings) -> JobSpec:
    """The job spec of a request, with the defaults of its cluster.

    Raises:
        SpecError: the spec is not valid; its ``problems`` have the lines of the YAML text.
    """
    base = directory_of(asked, settings)
    options: dict[str, Any] = {"base": base, "overrides": asked.overrides, "profile": chosen_profile(asked.cluster)}
    if asked.yaml is not None:
        spec = load_text(asked.yaml, **options)
    else:
        spec = spec_from_values(_plain(asked.spec), **options)
        spec._source = base / "spec.yaml"
    return _with_workdir(spec, base)


def _with_workdir(job: JobSpec, base: Path) -> JobSpec:
    """A job of this machine starts in the spec's directory; one on another machine, in the copy of its code."""
    if job.workdir is not None or elsewhere() is not None:
        return job
    return job.model_copy(update={"workdir": str(base)})


def any_spec(asked: SpecRequest, settings: ServiceSettings) -> JobSpec:
    """The job spec of a request; if it has a section ``sweep``, which is checked as well, that of the sweep's job.

    Raises:
        SpecError: the spec is not valid.
    """
    values = asked.spec if asked.yaml is None else parse_yaml(asked.yaml, "spec.yaml").value
    is_sweep = isinstance(values, dict) and "sweep" in values
    return sweep_spec(asked, settings).job if is_sweep else job_spec(asked, settings)


def sweep_spec(asked: SpecRequest, settings: ServiceSettings) -> SweepSpec:
    """The sweep of a request. Errors are those of :func:`job_spec`."""
    base = directory_of(asked, settings)
    options: dict[str, Any] = {"base": base, "overrides": asked.overrides, "profile": chosen_profile(asked.cluster)}
    if asked.yaml is not None:
        spec = load_sweep_text(asked.yaml, **options)
    else:
        spec = sweep_from_values(_plain(asked.spec), **options)
        spec.job._source = base / "spec.yaml"
    return spec.model_copy(update={"job": _with_workdir(spec.job, base)})


def _plain(values: Mapping[str, Any] | None) -> dict[str, Any]:
    found = dict(values or {})
    entrypoint = found.get("entrypoint")
    if isinstance(entrypoint, dict) and entrypoint.get("function") is not None:
        raise SpecError(
            "entrypoint.function can be set only by hpcaccel.submit() in Python: use script, module or command"
        )
    return found
