"""What a check against a cluster's facts says: which setting, its value, what is allowed, and how old the facts are."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcaccel.spec import JobSpec
from hpcaccel.spec.files import read_document
from hpcaccel.spec.site import SiteFacts
from hpcaccel.spec.yaml12 import Plain

__all__ = ["Finding", "error", "listed", "located", "nearest", "warning", "with_age"]

_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that the cluster will not do as the spec has it (error), or that its user should know (warning)."""

    key: str
    """The setting, ``slurm.partition``."""
    message: str
    """Words that follow the key: the value first."""
    is_error: bool
    place: str = ""
    """Where the setting stands, ``job.yaml:12``."""

    def __str__(self) -> str:
        return f"{self.place}: {self.key} {self.message}" if self.place else f"{self.key} {self.message}"

    def to_json(self) -> dict[str, Any]:
        level = "error" if self.is_error else "warning"
        return {"level": level, "key": self.key, "message": self.message, "place": self.place}


def error(key: str, message: str) -> Finding:
    return Finding(key=key, message=message, is_error=True)


def warning(key: str, message: str) -> Finding:
    return Finding(key=key, message=message, is_error=False)


def listed(names: Sequence[str]) -> str:
    """``(has: gpu, debug)``, cut where there are many."""
    rest = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"(has: {', '.join(names[:_SHOWN])}{rest})" if names else "(has none)"


def nearest(word: str, names: Sequence[str]) -> str:
    """``. Did you mean 'gpu'?``, or nothing."""
    match = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f". Did you mean {match[0]!r}?" if match else ""


def with_age(finding: Finding, facts: SiteFacts, now: float | None = None) -> Finding:
    """With how old the facts are that it rests on."""
    stamp = f" [facts of {facts.name}, {facts.age_text(now)} old]"
    return replace(finding, message=f"{finding.message}{stamp}")


def located(findings: Sequence[Finding], spec: JobSpec) -> list[Finding]:
    """With the line of the spec file where each setting stands, as far as it has its value from there."""
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
    return values.text if isinstance(values, Plain) else None if values is None else str(values)
