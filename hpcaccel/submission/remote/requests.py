"""Requests from another machine, each turned into an hpcaccel command that uses the sent spec, profile and code.

A request with an id is executed once. A second request with the same id waits for the first and gets the same reply.
"""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import atomic_write, read_json, write_json
from hpcaccel.core.run_dir import RunDir, default_runs_dir
from hpcaccel.errors import RunDirectoryError, UserError
from hpcaccel.spec import load_profile
from hpcaccel.submission.code.provenance import SENT_COMMIT, SENT_FROM
from hpcaccel.submission.jobs.critical_section import give_back, remove_old_files, take
from hpcaccel.submission.remote.remote_index import state_folder

__all__ = ["Collector", "Reply", "arrived", "kept", "looked_at", "received_profile", "runs_folder", "submitted"]


@contextmanager
def received_profile(request: dict[str, Any]) -> Iterator[str]:
    """Use the profile and the facts of ``request`` in the block; yields the profile's name."""
    name = str(request["cluster"])
    with tempfile.TemporaryDirectory(prefix="hpcaccel-profile-") as folder:
        place = Path(folder)
        atomic_write(place / f"{name}.yaml", request["profile"], mode=0o600)
        if request.get("facts") is not None:
            (place / f"{name}.facts").mkdir()
            atomic_write(place / f"{name}.facts" / "facts.yaml", request["facts"], mode=0o600)
        os.environ["HPCACCEL_PROFILES"] = folder
        try:
            yield name
        finally:
            del os.environ["HPCACCEL_PROFILES"]


def runs_folder(request: dict[str, Any], name: str) -> Path:
    """The directory of runs: the one in the request, else the profile's, else the default."""
    if request["runs_dir"] is not None:
        return Path(os.path.expanduser(request["runs_dir"])).absolute()
    profile = load_profile(name)
    assert profile is not None
    return default_runs_dir(profile.runs_dir)


@contextmanager
def arrived(request: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the command that submits the spec in ``request``. The block runs in the directory of the code.

    Raises:
        RunDirectoryError: the directory of the code does not exist.
    """
    with received_profile(request) as name:
        runs_dir = runs_folder(request, name)
        base = Path(request["code"]) if request["code"] is not None else Path.cwd()
        if not base.is_dir():
            raise RunDirectoryError(f"the code directory {base} on the cluster no longer exists. Submit again")
        file = base / f".{request['kind']}-{request['id']}.yaml"
        atomic_write(file, json.dumps(request["document"]), mode=0o600)
        os.environ[SENT_COMMIT], os.environ[SENT_FROM] = request["commit"], request["from"]
        os.chdir(base)
        try:
            command = ["sweep", "start"] if request["kind"] == "sweep" else ["submit"]
            key = [] if request["key"] is None else ["--key", request["key"]]
            yield [*command, "--cluster", name, "--runs-dir", str(runs_dir), *key, *request["options"], "--", str(file)]
        finally:
            file.unlink(missing_ok=True)


@contextmanager
def looked_at(request: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the command that checks the spec in ``request``; an empty file replaces the program, which is not sent."""
    with received_profile(request) as name, tempfile.TemporaryDirectory(prefix="hpcaccel-look-") as folder:
        base = Path(folder)
        document = request["document"]
        for job in document["jobs"].values() if "jobs" in document else [document]:
            _stand_in(job["entrypoint"], base)
        file = base / "job.yaml"
        atomic_write(file, json.dumps(document), mode=0o600)
        runs_dir = [] if request["runs_dir"] is None else ["--runs-dir", str(runs_folder(request, name))]
        yield [*request["command"], "--cluster", name, *runs_dir, "--", str(file)]


def _stand_in(entrypoint: dict[str, Any], base: Path) -> None:
    """Create an empty file in place of the program, because a missing program is an error."""
    program = entrypoint.get("script") or (entrypoint.get("command") or [""])[0]
    if program.startswith("./") and ".." not in Path(program).parts:
        (base / program).parent.mkdir(parents=True, exist_ok=True)
        (base / program).touch()


def submitted(request: dict[str, Any]) -> dict[str, Any]:
    """The result of a submission, with the keys ``run`` (``runs`` for a file with several jobs) and ``open``.

    ``open`` is whether the outcome is unknown or some jobs are not submitted. If it is true, repeating the request with
    the same key continues the submission.
    """
    from hpcaccel.submission.jobs.job_submission import is_open
    from hpcaccel.submission.submit.api import is_half_submitted, key_of

    key, several = request["key"], request["kind"] == "jobs"
    keys = [key_of(key, number) for number in range(len(request["document"]["jobs"]))] if several else [key]
    found = [run for one in keys if (run := _run_of(one)) is not None]
    outcome = {"open": any(map(is_open, found)) or is_half_submitted(found, of=len(keys))}
    runs = [_index_entry(run) for run in found]
    return {"run": None, "runs": runs, **outcome} if several else {"run": runs[0] if runs else None, **outcome}


def _run_of(key: str | None) -> RunDir | None:
    """The run submitted under a key; None if there is none."""
    from hpcaccel.submission.jobs.job_submission import is_open
    from hpcaccel.submission.jobs.run_state import read_record
    from hpcaccel.submission.submit.comparison import key_file

    submission = None if key is None else read_json(key_file(key))
    if submission is None or not RunDir(submission["run"]).record.exists():
        return None
    run = RunDir(submission["run"])
    return run if read_record(run).job_ids or is_open(run) else None


def _index_entry(run: RunDir) -> dict[str, str]:
    """The run's entry for the index of the other machine; ``job_id`` is "" while it is unknown."""
    from hpcaccel.submission.jobs.run_state import read_record

    record = read_record(run)
    known = {"run_id": run.run_id, "name": record.name, "job_id": "".join(record.job_ids[-1:]), "path": str(run.path)}
    return {**known, "kind": record.kind}


KEPT_SECONDS = 7 * 86_400
"""Time for which replies are stored."""


class Collector:
    """Collects the payloads of frames, in place of a ``FrameWriter``."""

    def __init__(self) -> None:
        self.out = b""
        self.err = b""

    def send(self, frame: str, payload: bytes = b"", **values: Any) -> None:
        if frame == "out":
            self.out += payload
        else:
            self.err += payload


class Reply:
    """The outcome of a request; ``code`` is None until the request has ended."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        stored = None if file is None else read_json(file)
        self.code: int | None = None if stored is None else int(stored["code"])
        self.out = b"" if stored is None else base64.b64decode(stored["out"])
        self.err = b"" if stored is None else base64.b64decode(stored["err"])

    def keep(self, code: int, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out, err
        if self._file is not None:
            texts = {"out": base64.b64encode(out).decode(), "err": base64.b64encode(err).decode()}
            try:
                write_json(self._file, {"code": code, **texts}, mode=0o600)
            except OSError as error:  # the request has been executed, and this connection can still report it
                self.err += f"warning: the reply could not be stored on the cluster: {error.strerror}\n".encode()


@contextmanager
def kept(name: str | None) -> Iterator[Reply]:
    """Yield the reply to the request ``name``, under a lock. The reply is empty if none is stored yet.

    If ``name`` is None, the reply is empty and will not be stored.

    Raises:
        UserError: ``name`` is not a request id.
    """
    if name is None:
        yield Reply(None)
        return
    if not re.fullmatch(r"[0-9a-f]{32}", name):
        raise UserError(f"{name!r} is not a valid request ID")
    folder = state_folder() / "replies"
    remove_old_files(folder, older_than_seconds=KEPT_SECONDS)
    file = folder / f"{name}.lock"
    lock = take(file, what="is executing the same request")
    try:
        yield Reply(folder / f"{name}.json")
    finally:
        give_back(file, lock)
