"""Findings of checks against a cluster's facts: each names a setting, its value, what is allowed, the facts' age."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcaccel.spec import JobSpec
from hpcaccel.spec.cluster.cluster_facts import SiteFacts
from hpcaccel.spec.loading.layers import read_document
from hpcaccel.spec.yaml12 import PlainScalar

__all__ = ["Finding", "error", "listed", "located", "warning", "with_age"]

_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A setting that the cluster does not allow (error), or about which the user should be warned (warning)."""

    key: str
    """The setting, such as ``slurm.partition``."""
    message: str
    """The text that follows the key. For most settings, this text begins with the value."""
    is_error: bool
    place: str = ""
    """The place of the setting in a file, such as ``job.yaml:12``; "" if there is none."""

    def __str__(self) -> str:
        return f"{self.place}: {self.key} {self.message}" if self.place else f"{self.key} {self.message}"

    def to_json(self) -> dict[str, Any]:
        level = "error" if self.is_error else "warning"
        return {"level": level, "key": self.key, "message": self.message, "place": self.place}


def error(key: str, message: str) -> Finding:
    return Finding(key=key, message=message, is_error=True)


def warning(key: str, message: str) -> Finding:
    return Finding(key=key, message=message, is_error=False)


def listed(names: Sequence[str], label: str = "has") -> str:
    """The names in parentheses, such as ``(has: gpu, debug)``, truncated if there are many."""
    rest = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"({label}: {', '.join(names[:_SHOWN]) or 'none'}{rest})"


def with_age(finding: Finding, facts: SiteFacts, now: float | None = None) -> Finding:
    """The finding, with the age of the facts appended."""
    stamp = f" [facts of {facts.name}, {facts.age_text(now)} old]"
    return replace(finding, message=f"{finding.message}{stamp}")


def located(findings: Sequence[Finding], spec: JobSpec) -> list[Finding]:
    """The findings, each with the place of its setting in the spec file if the value comes from that file."""
    if spec.source is None or not findings or not spec.source.is_file():
        return list(findings)
    document = read_document(spec.source, str(spec.source))
    found = []
    for one in findings:
        path = tuple(one.key.split("."))
        place = document.places.get(path)
        is_ours = place is not None and _text(document.value, path) == _text(spec.model_dump(mode="json"), path)
        found.append(replace(one, place=str(place)) if is_ours else one)
    return found


def _text(values: Any, path: Sequence[str]) -> str | None:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values.text if isinstance(values, PlainScalar) else None if values is None else str(values)
