"""Finding a run by what a person remembers: its id, the beginning of one, its name, its job id, or its folder."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.run_dir import RunDir, SweepDir, default_runs_dir, index_lines, read_json
from hpcaccel.errors import HpcaccelError, RunNotFound
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.idempotent_resume import is_open
from hpcaccel.submission.recovery import recover_now
from hpcaccel.submission.run_handle import AnyRun, Run, RunArray, SweepRun, open_run
from hpcaccel.submission.run_index import Look, Remembered
from hpcaccel.submission.run_state import read_record

__all__ = ["Known", "all_runs", "find_run", "known_runs"]

_SHOWN = 5


@dataclass(frozen=True)
class Known:
    """A run that is there, as far as its record says."""

    path: Path
    run_id: str
    name: str
    kind: str = "run"
    array_size: int | None = None

    def open(self, slurm: Slurm | None = None) -> AnyRun:
        """The handle, without reading the record once more."""
        if self.kind == "sweep":
            return SweepRun(self.path, slurm=slurm, is_known=True)
        if self.array_size is not None:
            return RunArray(self.path, slurm=slurm, is_known=True)
        return Run(self.path, slurm=slurm, is_known=True)


def all_runs(runs_dir: Path | None = None, *, slurm: Slurm | None = None) -> list[AnyRun]:
    """Every run of the index and of ``runs_dir`` (default: the one that submit would use), oldest first."""
    return [known.open(slurm) for known in known_runs(runs_dir)]


def find_run(
    token: str, *, runs_dir: Path | None = None, slurm: Slurm | None = None, only_sweeps: bool = False
) -> AnyRun:
    """The run that ``token`` names: a run id, a unique beginning of one, a name (its latest run), a job id, or a path.

    ``<id>_3`` and ``46_3`` name one task of an array, ``<id>_3`` also a trial of a sweep.

    Args:
        only_sweeps: a name, or the beginning of an id, is that of a sweep: a run that was submitted later under the
            same name, such as its best trial, does not hide it.

    Raises:
        RunNotFound: there is none, or the beginning fits several; the message lists what comes near.
    """
    if not token:
        raise RunNotFound("an empty name fits no run")
    if (found := _by_path(token)) is not None:
        return open_run(found, slurm=slurm)
    runs = known_runs(runs_dir)
    sweeps = [run for run in runs if run.kind == "sweep"] if only_sweeps else runs
    for search, among in ((_by_id, runs), (_by_name, sweeps), (_by_job_id, runs), (_by_prefix, sweeps)):
        if (path := search(token, among)) is not None:
            return open_run(path, slurm=slurm)
    if (path := _by_unwritten_job_id(token, runs, slurm)) is not None:
        return open_run(path, slurm=slurm)
    if only_sweeps and (other := _by_name(token, runs) or _by_prefix(token, runs)) is not None:
        return open_run(other, slurm=slurm)
    raise RunNotFound(_not_found(token, runs))


def _by_path(token: str) -> Path | None:
    run = RunDir(token) if os.sep in token else None
    return run.path if run is not None and run.record.exists() else None


def _by_id(token: str, runs: list[Known]) -> Path | None:
    base, _, index = token.partition("_")
    for run in runs:
        if run.run_id == token:
            return run.path
        if run.run_id == base and index.isdigit():
            parts = (RunDir(run.path).task(int(index)), SweepDir(run.path).trial(int(index)))
            return next((part.path for part in parts if part.record.exists()), None)
    return None


def _by_name(token: str, runs: list[Known]) -> Path | None:
    return next((run.path for run in reversed(runs) if run.name == token), None)


def _by_job_id(token: str, runs: list[Known]) -> Path | None:
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


def _by_unwritten_job_id(token: str, runs: list[Known], slurm: Slurm | None) -> Path | None:
    """The same of a job whose submit was cut off before it was written down."""
    if not token.partition("_")[0].isdigit():
        return None
    unfinished = [run for run in runs if is_open(RunDir(run.path))]
    recover_now((RunDir(run.path) for run in unfinished), slurm=slurm)
    return _by_job_id(token, unfinished)


def _by_prefix(token: str, runs: list[Known]) -> Path | None:
    matches = [run for run in runs if run.run_id.startswith(token)]
    if len(matches) > 1:
        raise RunNotFound(f"{token!r} is the beginning of {len(matches)} run ids:\n{_listed(matches)}\nGive more of it")
    return matches[0].path if matches else None


def _not_found(token: str, runs: list[Known]) -> str:
    if not runs:
        return f"no run {token!r}: there are no runs yet (looked into {default_runs_dir()} and the index)"
    words = {run.run_id: run for run in runs} | {run.name: run for run in runs}
    close = [words[word] for word in difflib.get_close_matches(token, words, n=_SHOWN, cutoff=0.6)]
    if close:
        return f"no run {token!r}. Near it:\n{_listed(list(dict.fromkeys(close)))}"
    return f"no run {token!r} among {len(runs)}. The latest:\n{_listed(runs[-_SHOWN:])}"


def _listed(runs: list[Known]) -> str:
    return "\n".join(f"  {run.run_id}  {run.name}" for run in runs[-20:])


def known_runs(runs_dir: Path | None = None) -> list[Known]:
    """Runs that still exist, of the index and of ``runs_dir`` (default: the one that submit would use), oldest first,
    each once."""
    names = Remembered("names")
    found: dict[tuple[int, int], Known] = {}
    for path in dict.fromkeys([*_indexed(), *_scanned(runs_dir or default_runs_dir())]):
        if (there := _identity(path)) is None or there in found:
            continue
        if (known := _look(path, names)) is not None:
            found[there] = known
    names.write()
    return sorted(found.values(), key=lambda known: known.run_id)


def _indexed() -> Iterator[str]:
    for line in index_lines():
        if isinstance(path := line.get("path"), str):
            yield os.path.abspath(path)


def _scanned(runs_dir: Path) -> Iterator[str]:
    """``<runs_dir>/<name>/<run_id>``"""
    for name in _folders(str(runs_dir.absolute())):
        yield from _folders(name)


def _folders(place: str) -> list[str]:
    try:
        return sorted(entry.path for entry in os.scandir(place) if not entry.name.startswith(".") and entry.is_dir())
    except OSError:
        return []


def _identity(path: str) -> tuple[int, int] | None:
    """The same for every name of a run's directory; None where none is."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _look(path: str, names: Remembered) -> Known | None:
    """None where there is no run any more, or one whose record is damaged: it must not hide the others."""
    if (value := names.recall(path)) is not None and isinstance(value.get("name"), str):
        return Known(
            Path(path), os.path.basename(path), value["name"], value.get("kind", "run"), value.get("array_size")
        )
    run = RunDir(path)
    look = Look(path, [run.record.name])
    try:
        record = read_record(run)
    except (HpcaccelError, OSError):
        return None
    names.keep(look, {"name": record.name, "kind": record.kind, "array_size": record.array_size})
    return Known(run.path, run.run_id, record.name, record.kind, record.array_size)
