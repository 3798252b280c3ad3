"""Comparison of submissions: the key by which a repeated command continues, and the changes since the last run."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.run_dir import RunDir, state_home
from hpcaccel.errors import HpcaccelError
from hpcaccel.submission.jobs.critical_section import UNLOCKED, give_back, remove_old_files, take_if_free, warn_no_state
from hpcaccel.submission.jobs.job_submission import is_open, may_have_job
from hpcaccel.submission.jobs.run_state import read_record

if TYPE_CHECKING:  # a command about a run reads the keys here, and no spec
    from hpcaccel.submission.code.code_copy import CodePlan
    from hpcaccel.submission.submit.prepare import PreparedSubmission

__all__ = [
    "Changes", "PendingKey", "Setting", "changes_since_last", "changes_since_previous", "command_key", "command_of",
    "key_file", "pending_key",
]  # fmt: skip


MAX_DIFF_BYTES = 500_000
"""Larger files are reported as different, without a diff."""


@dataclass(frozen=True)
class Setting:
    """A setting with its old and its new value; None means not set."""

    key: str
    before: Any
    now: Any


@dataclass(frozen=True, kw_only=True)
class Changes:
    """How a submission differs from the last run of the same name. File names are relative to the code's folder."""

    run_id: str
    created: float
    """Time at which that run was submitted, in seconds since 1970."""
    settings: tuple[Setting, ...]
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    diff: str = ""
    """The changed text files as a unified diff."""
    code: str = "compared"
    """``compared``, or the reason why the code could not be compared."""

    @property
    def nothing(self) -> bool:
        return not (self.settings or self.added or self.removed or self.changed)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def changes_since_last(prepared: PreparedSubmission) -> Changes | None:
    """Compare a submission with the last run of its name, if any. For an array, only the first task is compared."""
    from hpcaccel.submission.clusters.checkpoint_checks import last_run_of

    for run in last_run_of(prepared.name, prepared.run.path.parent.parent):
        try:
            document, record = read_json(_first(run).spec), read_record(run)
        except HpcaccelError:
            continue  # a damaged directory cannot be compared
        if document is not None and "spec" in document:
            settings = tuple(_settings(document["spec"], prepared.tasks[0].spec.model_dump(mode="json")))
            code = _code(run.code, prepared.code, record.git_commit)
            return Changes(run_id=run.run_id, created=record.created, settings=settings, **code)
    return None


def changes_since_previous(run: RunDir) -> Changes | None:
    """Compare a run with the run of its name that was submitted before it, if any."""
    from hpcaccel.submission.clusters.checkpoint_checks import last_run_of

    record, now = read_record(run), read_json(_first(run).spec)
    for other in last_run_of(record.name, run.path.parent.parent):
        try:
            created, before = read_record(other).created, read_json(_first(other).spec)
        except HpcaccelError:
            continue  # a damaged directory cannot be compared
        if created >= record.created:  # ids of one second are in no order
            continue
        if now is None or before is None or "spec" not in before:
            continue
        code: dict[str, Any] = {"code": "a run has no copy of its code: only the settings are compared"}
        if run.code.is_dir() and other.code.is_dir():
            code = _compared(_files(other.code), _files(run.code))
        settings = tuple(_settings(before["spec"], now["spec"]))
        return Changes(run_id=other.run_id, created=created, settings=settings, **code)
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
        why = "this submission does not copy code" if plan is None else "the last run has no copy of its code"
        at = f" (commit of the last run: {commit[:12]})" if commit else ""
        return {"code": f"{why}{at}: only the settings are compared"}
    return _compared(_files(copy), {name: plan.root / name for name in plan.files if (plan.root / name).is_file()})


def _files(copy: Path) -> dict[PurePosixPath, Path]:
    return {PurePosixPath(path.relative_to(copy).as_posix()): path for path in copy.rglob("*") if path.is_file()}


def _compared(old: Mapping[PurePosixPath, Path], new: Mapping[PurePosixPath, Path]) -> dict[str, Any]:
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
        yield f"{name}: not a text file, so it cannot be compared line by line\n"
        return
    for line in difflib.unified_diff(before, now, f"before/{name}", f"now/{name}", lineterm=""):
        yield f"{line}\n"


COMMAND_SECONDS = 3600.0
"""Time within which a repeated command continues an interrupted one. After this time it counts as a new command."""
UNUSED_SECONDS = 7 * 86_400.0
"""Minimum age at which the file of a pending key is deleted. Keys that never expire are not deleted by age."""


def key_file(key: str) -> Path:
    """The file that records the run submitted under ``key``."""
    return state_home() / "hpcaccel" / "keys" / f"{key}.json"


@dataclass
class PendingKey:
    """The key of a command. The command sets ``done`` when nothing is left to continue."""

    key: str
    is_repeated: bool
    """Whether the same command was interrupted earlier: it may have submitted something."""
    done: bool = False


@contextmanager
def command_key(command: Mapping[str, Any]) -> Iterator[PendingKey]:
    """Yield a command's key. The key is ``done`` if the block succeeds, or fails without leaving a submission open.

    Args:
        command: the contents that identify the command.
    """
    with pending_key("submissions", command, kept_seconds=COMMAND_SECONDS) as pending:
        try:
            yield pending
            pending.done = True
        except BaseException as error:
            pending.done = not may_have_job(error) and not _has_open_runs(pending.key)
            raise


def _has_open_runs(key: str) -> bool:
    """Whether the outcome of a submission under ``key``, or under ``key-0``, ``key-1`` …, is unknown."""
    values = [read_json(file) for file in key_file(key).parent.glob(f"{key}*.json")]
    return any(is_open(RunDir(value["run"])) for value in values if value is not None)


@contextmanager
def pending_key(kind: str, contents: Mapping[str, Any], *, kept_seconds: float | None) -> Iterator[PendingKey]:
    """Yield a key for a request. It is on disk before the block begins, and deleted after it if the block set ``done``.

    A later call with the same contents gets the same key. Concurrent calls get different keys, because a key's file is
    locked while in use. Without locks, or if nothing can be written, each call gets a new key.

    Args:
        kind: a folder in the user's state directory.
        contents: the contents that identify the request.
        kept_seconds: time for which a key is reused; None for no limit.
    """
    text = json.dumps(contents, sort_keys=True)
    folder = state_home() / "hpcaccel" / kind
    if kept_seconds is not None:
        remove_old_files(folder, older_than_seconds=max(kept_seconds, UNUSED_SECONDS))
    path, lock = _free_file(folder, hashlib.sha256(text.encode()).hexdigest()[:32])
    if lock == UNLOCKED:
        yield PendingKey(uuid.uuid4().hex, is_repeated=False)
        return
    try:
        before = read_json(path)
        if before is not None and kept_seconds is not None and time.time() - path.stat().st_mtime > kept_seconds:
            before = None
        pending = PendingKey(uuid.uuid4().hex if before is None else str(before["key"]), before is not None)
        if before is None:
            try:
                write_json(path, {"key": pending.key}, mode=0o600)
            except OSError as error:
                warn_no_state(error, folder)
        try:
            yield pending
        finally:
            if pending.done:
                path.unlink(missing_ok=True)
    finally:
        give_back(path.with_suffix(".lock"), lock, remove=not path.exists())


def _free_file(folder: Path, name: str) -> tuple[Path, int]:
    """Lock the first of ``name-0``, ``name-1`` … that no running process uses; existing files come first."""
    for path in sorted(folder.glob(f"{name}-*.json")):
        if (lock := take_if_free(path.with_suffix(".lock"))) is not None:
            if lock == UNLOCKED or path.exists():
                return path, lock
            give_back(path.with_suffix(".lock"), lock, remove=True)
    for number in range(1000):
        path = folder / f"{name}-{number}.json"
        if (lock := take_if_free(path.with_suffix(".lock"))) is not None:
            return path, lock
    raise AssertionError(f"1000 keys in use at the same time in {folder}")


def command_of(submissions: Sequence[PreparedSubmission], *, more: str = "") -> dict[str, Any]:
    """The contents that identify a command that submits, for :func:`command_key`.

    Args:
        submissions: the submissions of one command.
        more: contents that are not in the specs of the runs, such as the hash of a sweep.
    """
    ids = [one.run.run_id for one in submissions]
    return {"runs": [_of_run(one, ids) for one in submissions], "more": more}


def _of_run(prepared: PreparedSubmission, ids: Sequence[str]) -> dict[str, Any]:
    from hpcaccel.spec import spec_hash

    parts = "\0".join([prepared.script, *(spec_hash(task.spec) for task in prepared.tasks), *map(str, prepared.after)])
    for number, run_id in enumerate(ids):
        parts = parts.replace(run_id, f"RUN{number}")  # every call has new ids
    return {
        "folder": str(prepared.run.path.parent),
        "cluster": prepared.cluster,
        "made of": hashlib.sha256(parts.encode()).hexdigest(),
        "code": "" if prepared.code is None else _of_code(prepared.code),
        "function": hashlib.sha256(prepared.function or b"").hexdigest(),
    }


def _of_code(plan: CodePlan) -> str:
    """A hash of the files' names, sizes and times. Reading all files would take as long as copying them."""
    found = hashlib.sha256(str(plan.root).encode())
    for name in plan.files:
        try:
            one = os.lstat(plan.root / name)
        except OSError:
            continue  # copying the file reports the error
        found.update(f"\0{name}\0{one.st_size}\0{one.st_mtime_ns}".encode())
    return found.hexdigest()
