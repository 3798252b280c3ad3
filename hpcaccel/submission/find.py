"""Finding a run by what a person remembers: its id, the beginning of one, its name, its job id, or its folder."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.errors import HpcaccelError, RunNotFound
from hpcaccel.rundir import RunDir, SweepDir, default_runs_dir, index_lines, read_json
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.facts import read_record
from hpcaccel.submission.recovery import recover_now
from hpcaccel.submission.resume_once import is_open
from hpcaccel.submission.run import AnyRun, open_run

__all__ = ["all_runs", "find_run"]

_SHOWN = 5


@dataclass(frozen=True)
class _Known:
    path: Path
    run_id: str
    name: str


def all_runs(runs_dir: Path | None = None, *, slurm: Slurm | None = None) -> list[AnyRun]:
    """Every run of the index and of ``runs_dir`` (default: the one that submit would use), oldest first."""
    return [open_run(known.path, slurm=slurm) for known in _known(runs_dir)]


def find_run(token: str, *, runs_dir: Path | None = None, slurm: Slurm | None = None) -> AnyRun:
    """The run that ``token`` names: a run id, a unique beginning of one, a name (its latest run), a job id, or a path.

    ``<id>_3`` and ``46_3`` name one task of an array, ``<id>_3`` also a trial of a sweep.

    Raises:
        RunNotFound: there is none, or the beginning fits several; the message lists what comes near.
    """
    if not token:
        raise RunNotFound("an empty name fits no run")
    if (found := _by_path(token)) is not None:
        return open_run(found, slurm=slurm)
    runs = _known(runs_dir)
    for search in (_by_id, _by_name, _by_job_id, _by_prefix):
        if (path := search(token, runs)) is not None:
            return open_run(path, slurm=slurm)
    if (path := _by_unwritten_job_id(token, runs, slurm)) is not None:
        return open_run(path, slurm=slurm)
    raise RunNotFound(_not_found(token, runs))


def _by_path(token: str) -> Path | None:
    path = Path(token).absolute()
    return path if os.sep in token and RunDir(path).record.exists() else None


def _by_id(token: str, runs: list[_Known]) -> Path | None:
    base, _, index = token.partition("_")
    for run in runs:
        if run.run_id == token:
            return run.path
        if run.run_id == base and index.isdigit():
            parts = (RunDir(run.path).task(int(index)), SweepDir(run.path).trial(int(index)))
            return next((part.path for part in parts if part.record.exists()), None)
    return None


def _by_name(token: str, runs: list[_Known]) -> Path | None:
    return next((run.path for run in reversed(runs) if run.name == token), None)


def _by_job_id(token: str, runs: list[_Known]) -> Path | None:
    base, _, index = token.partition("_")
    if not (base.isdigit() or base.startswith("local-")):
        return None
    for run in reversed(runs):
        here = RunDir(run.path)
        record = read_json(here.record) or {}
        job_ids = [*record.get("job_ids", []), *record.get("links", [])]
        if token in job_ids:
            return run.path
        if base in job_ids and index.isdigit() and here.task(int(index)).record.exists():
            return here.task(int(index)).path
        if base in job_ids and record.get("kind") == "sweep":
            return run.path  # a worker is no run of its own
    return None


def _by_unwritten_job_id(token: str, runs: list[_Known], slurm: Slurm | None) -> Path | None:
    """The same of a job whose submit was cut off before it was written down."""
    if not token.partition("_")[0].isdigit():
        return None
    unfinished = [run for run in runs if is_open(RunDir(run.path))]
    for run in unfinished:
        recover_now(RunDir(run.path), slurm=slurm)
    return _by_job_id(token, unfinished)


def _by_prefix(token: str, runs: list[_Known]) -> Path | None:
    matches = [run for run in runs if run.run_id.startswith(token)]
    if len(matches) > 1:
        raise RunNotFound(f"{token!r} is the beginning of {len(matches)} run ids:\n{_listed(matches)}\nGive more of it")
    return matches[0].path if matches else None


def _not_found(token: str, runs: list[_Known]) -> str:
    if not runs:
        return f"no run {token!r}: there are no runs yet (looked into {default_runs_dir()} and the index)"
    words = {run.run_id: run for run in runs} | {run.name: run for run in runs}
    close = [words[word] for word in difflib.get_close_matches(token, words, n=_SHOWN, cutoff=0.6)]
    if close:
        return f"no run {token!r}. Near it:\n{_listed(list(dict.fromkeys(close)))}"
    return f"no run {token!r} among {len(runs)}. The latest:\n{_listed(runs[-_SHOWN:])}"


def _listed(runs: list[_Known]) -> str:
    return "\n".join(f"  {run.run_id}  {run.name}" for run in runs[-20:])


def _known(runs_dir: Path | None) -> list[_Known]:
    """Runs that still exist, oldest first, each once."""
    found: dict[Path, _Known] = {}
    for known in [*_indexed(), *_scanned(runs_dir or default_runs_dir())]:
        found.setdefault(known.path.resolve(), known)
    return sorted(found.values(), key=lambda known: known.run_id)


def _indexed() -> Iterator[_Known]:
    for line in index_lines():
        path = line.get("path")
        if isinstance(path, str) and (known := _look(Path(path))) is not None:
            yield known


def _scanned(runs_dir: Path) -> Iterator[_Known]:
    """``<runs_dir>/<name>/<run_id>``"""
    for record in sorted(runs_dir.glob("[!.]*/[!.]*/record.json")):
        if (known := _look(record.parent)) is not None:
            yield known


def _look(path: Path) -> _Known | None:
    """None where there is no run any more, or one whose record is damaged: it must not hide the others."""
    run = RunDir(path)
    try:
        return _Known(run.path, run.run_id, read_record(run).name)
    except (HpcaccelError, OSError):
        return None
