"""What has changed since the last run of the same name: settings of the resolved spec, and the code."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hpcaccel.core.run_dir import RunDir, read_json
from hpcaccel.errors import HpcaccelError
from hpcaccel.submission.code_copy import CodePlan
from hpcaccel.submission.prepare import Prepared
from hpcaccel.submission.run_state import read_record
from hpcaccel.submission.site.last_run import last_run_of

__all__ = ["Changes", "Setting", "changes_since_last"]

MAX_DIFF_BYTES = 500_000
"""Files larger than this are only said to differ."""


@dataclass(frozen=True)
class Setting:
    """One setting whose value is another one; None stands for "not set"."""

    key: str
    before: Any
    now: Any


@dataclass(frozen=True, kw_only=True)
class Changes:
    """How a submission differs from the last run of its name. File names are relative to the code's folder."""

    run_id: str
    created: float
    """When that run was submitted, in seconds since 1970."""
    settings: tuple[Setting, ...]
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    diff: str = ""
    """The changed text files as a unified diff."""
    code: str = "compared"
    """``compared``, or why the code could not be: a sentence."""

    @property
    def nothing(self) -> bool:
        return not (self.settings or self.added or self.removed or self.changed)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def changes_since_last(prepared: Prepared) -> Changes | None:
    """Compare with the newest run of that name; None where there is none.

    Of an array the first task is compared.
    """
    for run in last_run_of(prepared.name, prepared.run.path.parent.parent):
        try:
            document, record = read_json(_first(run).spec), read_record(run)
        except HpcaccelError:
            continue  # a damaged directory has nothing to compare with
        if document is not None and "spec" in document:
            settings = tuple(_settings(document["spec"], prepared.tasks[0].spec.model_dump(mode="json")))
            code = _code(run.code, prepared.code, record.git_commit)
            return Changes(run_id=run.run_id, created=record.created, settings=settings, **code)
    return None


def _first(run: RunDir) -> RunDir:
    task = run.task(0)
    return task if task.spec.exists() else run


def _settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Setting]:
    old, new = dict(_flat(before)), dict(_flat(now))
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            yield Setting(key, old.get(key), new.get(key))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif value != {}:
            yield f"{prefix}{key}", value


def _code(copy: Path, plan: CodePlan | None, commit: str | None) -> dict[str, Any]:
    if plan is None or not copy.is_dir():
        which = "this submission copies no code" if plan is None else "that run kept no copy of its code"
        return {"code": f"{which}{f' (it was at commit {commit[:12]})' if commit else ''}: only settings are compared"}
    old = {PurePosixPath(path.relative_to(copy).as_posix()): path for path in copy.rglob("*") if path.is_file()}
    new = {name: plan.root / name for name in plan.files if (plan.root / name).is_file()}
    differing = sorted(name for name in old.keys() & new.keys() if _differ(old[name], new[name]))
    return {
        "added": tuple(str(name) for name in sorted(new.keys() - old.keys())),
        "removed": tuple(str(name) for name in sorted(old.keys() - new.keys())),
        "changed": tuple(map(str, differing)),
        "diff": "".join(line for name in differing for line in _diff(name, old[name], new[name])),
    }


def _differ(a: Path, b: Path) -> bool:
    return a.stat().st_size != b.stat().st_size or a.read_bytes() != b.read_bytes()


def _diff(name: PurePosixPath, old: Path, new: Path) -> Iterator[str]:
    if max(old.stat().st_size, new.stat().st_size) > MAX_DIFF_BYTES:
        yield f"{name}: too large to compare line by line\n"
        return
    try:
        before, now = (path.read_text(encoding="utf-8").splitlines() for path in (old, new))
    except UnicodeDecodeError:
        yield f"{name}: no text\n"
        return
    for line in difflib.unified_diff(before, now, f"before/{name}", f"now/{name}", lineterm=""):
        yield f"{line}\n"
