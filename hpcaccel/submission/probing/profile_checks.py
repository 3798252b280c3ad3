"""A profile held against the facts of its cluster: what of it cannot be, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcaccel.errors import SpecError
from hpcaccel.slurm import hostlist
from hpcaccel.spec import ClusterProfile, spec_from_values
from hpcaccel.spec.site import SiteFacts
from hpcaccel.submission.site.checks import check_site
from hpcaccel.submission.site.findings import listed

__all__ = ["STALE_DAYS", "Contradiction", "check"]

STALE_DAYS = 30
"""Facts older than this are named as such: sites change their partitions a few times a year."""


@dataclass(frozen=True)
class Contradiction:
    """One thing of a profile that its cluster's facts speak against."""

    key: str
    message: str
    """Words that follow the key: the value first."""
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.key} {self.message}"


def check(profile: ClusterProfile, facts: SiteFacts) -> list[Contradiction]:
    """Everything in ``profile`` that contradicts ``facts``; [] where they agree.

    Raises:
        SpecError: the profile's own sections cannot stand together.
    """
    return [*_defaults(profile, facts), *_excluded(profile, facts), *_other(profile, facts)]


def _defaults(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Contradiction]:
    """A job with nothing but the profile's defaults; what is said of its own settings is not the profile's fault."""
    spec = spec_from_values({"name": profile.name, "entrypoint": {"command": ["true"]}}, profile=profile)
    given = set(profile.slurm.model_fields_set)
    for one in check_site(spec, facts):
        section, _, key = one.key.partition(".")
        if section == "slurm" and key in given:
            yield Contradiction(one.key, one.message, one.is_error)


def _excluded(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Contradiction]:
    try:
        known = {name for kind in facts.node_types for name in hostlist.expand(kind.nodes)}
        wanted = {item: hostlist.expand(item) for item in profile.exclude}
    except ValueError as error:
        raise SpecError(f"exclude: {error}") from None
    for item, names in wanted.items():
        missing = [name for name in names if name not in known]
        if known and missing:
            yield Contradiction("exclude", f"{item!r}: the cluster has no node {missing[0]} {listed(sorted(known))}")


def _other(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Contradiction]:
    if profile.host != facts.host:
        there, here = (facts.host or "this machine itself"), (profile.host or "this machine itself")
        yield Contradiction("host", f"{here!r}: the facts were read on {there}", is_error=False)
    if profile.host is not None and facts.hpcaccel is None:
        yield Contradiction("hpcaccel", f"is not found on {profile.host}: `hpcaccel cluster install {profile.name}`")
    if not profile.runs_dir and profile.host is not None:
        yield Contradiction("runs_dir", "is not set: runs would lie in your home there", is_error=False)
