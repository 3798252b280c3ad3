"""The other side: a spec, a profile and code that came over, made into a command of hpcaccel's."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import RunDir, atomic_write, default_runs_dir, read_json
from hpcaccel.errors import RunDirectoryError
from hpcaccel.spec import load_profile
from hpcaccel.submission.provenance import SENT_COMMIT, SENT_FROM

__all__ = ["arrived", "looked_at", "profile_that_came", "runs_folder", "submitted"]


@contextmanager
def profile_that_came(request: dict[str, Any]) -> Iterator[str]:
    """Let the profile of ``request`` and the facts that came with it be this command's; its name."""
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
    """Where runs are made: as was asked for, as the profile says, or in the home directory."""
    if request["runs_dir"] is not None:
        return Path(os.path.expanduser(request["runs_dir"])).absolute()
    profile = load_profile(name)
    assert profile is not None
    return default_runs_dir(profile.runs_dir)


@contextmanager
def arrived(request: dict[str, Any]) -> Iterator[list[str]]:
    """The command that submits what ``request`` holds.

    Raises:
        RunDirectoryError: the code that it names is not here.
    """
    with profile_that_came(request) as name:
        runs_dir = runs_folder(request, name)
        base = Path(request["code"]) if request["code"] is not None else Path.cwd()
        if not base.is_dir():
            raise RunDirectoryError(f"the code has gone from {base} on the cluster. Submit once more")
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
    """The command that looks at the spec in ``request``, which is not submitted; its program has stayed where it is."""
    with profile_that_came(request) as name, tempfile.TemporaryDirectory(prefix="hpcaccel-look-") as folder:
        base = Path(folder)
        document = request["document"]
        for job in document["jobs"].values() if "jobs" in document else [document]:
            _stand_in(job["entrypoint"], base)
        file = base / "job.yaml"
        atomic_write(file, json.dumps(document), mode=0o600)
        runs_dir = [] if request["runs_dir"] is None else ["--runs-dir", str(runs_folder(request, name))]
        yield [*request["command"], "--cluster", name, *runs_dir, "--", str(file)]


def _stand_in(entrypoint: dict[str, Any], base: Path) -> None:
    """An empty file where the spec names the program, since a program that is missing would be a mistake."""
    program = entrypoint.get("script") or (entrypoint.get("command") or [""])[0]
    if program.startswith("./") and ".." not in Path(program).parts:
        (base / program).parent.mkdir(parents=True, exist_ok=True)
        (base / program).touch()


def submitted(request: dict[str, Any]) -> dict[str, Any]:
    """What was submitted for ``request``: its ``run``, of a file with several jobs its ``runs``; and whether it is
    ``open``: the same request, made once more under its key, has something to find out or to go on with."""
    from hpcaccel.submission.idempotent_resume import is_open
    from hpcaccel.submission.workflow import is_half_submitted, key_of

    key, several = request["key"], request["kind"] == "jobs"
    keys = [key_of(key, number) for number in range(len(request["document"]["jobs"]))] if several else [key]
    found = [run for one in keys if (run := _run_of(one)) is not None]
    told = {"open": any(map(is_open, found)) or is_half_submitted(found, of=len(keys))}
    runs = [_told(run) for run in found]
    return {"run": None, "runs": runs, **told} if several else {"run": runs[0] if runs else None, **told}


def _run_of(key: str | None) -> RunDir | None:
    """The run of a key; None where nothing was submitted."""
    from hpcaccel.submission.idempotent import key_file
    from hpcaccel.submission.idempotent_resume import is_open
    from hpcaccel.submission.run_state import read_record

    said = None if key is None else read_json(key_file(key))
    if said is None or not RunDir(said["run"]).record.exists():
        return None
    run = RunDir(said["run"])
    return run if read_record(run).job_ids or is_open(run) else None


def _told(run: RunDir) -> dict[str, str]:
    """As this side's index would tell it; without a job id as long as nobody knows it."""
    from hpcaccel.submission.run_state import read_record

    record = read_record(run)
    known = {"run_id": run.run_id, "name": record.name, "job_id": "".join(record.job_ids[-1:]), "path": str(run.path)}
    return {**known, "kind": record.kind}
