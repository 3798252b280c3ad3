"""Route that lists the clusters of the profiles, with the age of the facts that are stored about each."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from hpcaccel.errors import SpecError
from hpcaccel.service.answers import ERRORS
from hpcaccel.service.run_source import RunSource
from hpcaccel.spec import load_profile, profile_names
from hpcaccel.spec.cluster.cluster_facts import load_facts

__all__ = ["cluster_routes"]


class ClusterRow(BaseModel):
    """A cluster profile."""

    name: str
    backend: str
    host: str | None
    """The login node, if Slurm is not on the service's machine."""
    default: bool
    slurm_version: str | None
    facts_age_seconds: float | None
    """Age of the stored facts; null if the cluster was not probed."""
    partitions: list[str]
    problem: str
    """Why the profile, its facts, or the list of its runs behind SSH cannot be read; empty if they can."""


def cluster_routes(source: RunSource) -> APIRouter:
    """The route ``/clusters``."""
    routes = APIRouter(tags=["clusters"], responses=ERRORS)

    @routes.get("/clusters")
    def clusters() -> list[ClusterRow]:
        """The clusters of the profiles."""
        found = [_row(name) for name in profile_names()]
        for row in found:
            row.problem = row.problem or source.remote.problems().get(row.name, "")
        return found

    return routes


def _row(name: str) -> ClusterRow:
    row = ClusterRow(
        name=name, backend="", host=None, default=False, slurm_version=None, facts_age_seconds=None, partitions=[],
        problem="",
    )  # fmt: skip
    try:
        profile = load_profile(name)
        assert profile is not None
        row.backend, row.host, row.default = profile.backend, profile.host, profile.default
        facts = load_facts(name) if profile.backend == "slurm" else None
        if facts is not None:
            row.slurm_version, row.facts_age_seconds = facts.slurm_version, facts.age_seconds()
            row.partitions = [one.name for one in facts.partitions]
    except SpecError as error:
        row.problem = error.problems[0]
    return row
