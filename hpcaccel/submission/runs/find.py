"""Lookup of runs: by run id, a prefix of it, name, job id or folder; and the list of all known runs."""

from __future__ import annotations

import difflib
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.registered_runs import RunIndex, index_lines
from hpcaccel.core.run_dir import RUN_ID, RunDir, default_runs_dir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import HpcaccelError, RunNotFound
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.jobs.job_submission import is_open
from hpcaccel.submission.jobs.recovery import recover_now
from hpcaccel.submission.jobs.run_state import read_record
from hpcaccel.submission.runs.run_handle import AnyRun, Run, RunArray, SweepRun, open_run
from hpcaccel.submission.runs.run_index import CachedOverview, DirectoryStat

__all__ = ["FoundRun", "KnownRuns", "all_runs", "find_run", "known_runs"]

_SHOWN = 5


@dataclass(frozen=True)
class FoundRun:
    """An existing run, with the fields of its record that a listing needs."""

    path: Path
    run_id: str
    name: str
    kind: str = "run"
    array_size: int | None = None

    def open(self, slurm: Slurm | None = None) -> AnyRun:
        """Open the handle without reading the record again."""
        if self.kind == "sweep":
            return SweepRun(self.path, slurm=slurm, is_known=True)
        if self.array_size is not None:
            return RunArray(self.path, slurm=slurm, is_known=True)
        return Run(self.path, slurm=slurm, is_known=True)


def all_runs(runs_dir: Path | None = None, *, slurm: Slurm | None = None) -> list[AnyRun]:
    """All runs in the index and in ``runs_dir`` (default: the directory that submit would use), oldest first."""
    return [known.open(slurm) for known in known_runs(runs_dir)]


def find_run(
    token: str, *, runs_dir: Path | None = None, slurm: Slurm | None = None, only_sweeps: bool = False
) -> AnyRun:
    """Find a run by run id, unique prefix of a run id, name (the latest run of that name), job id, or path.

    ``<id>_3`` and ``46_3`` are tasks of an array; ``<id>_3`` can also be a trial of a sweep.

    Args:
        token: one of these.
        runs_dir: searched in addition to this user's index. Default: the directory that submit would use.
        slurm: the calls of Slurm's programs; tests pass a stand-in. Default: those of this machine.
        only_sweeps: names and prefixes match sweeps first: a run that was submitted later under the same name, such as
            the best trial, does not hide the sweep.

    Raises:
        RunNotFound: no run, or more than one, matches; the message lists similar runs.

    Example::

        run = hpcaccel.find_run("gpt")  # the latest run of this name
        print(run.status().state)
    """
    if not token:
        raise RunNotFound("the run name is empty: give a run ID, a name, a job ID or a path")
    if (found := _by_path(token)) is not None:
        return open_run(found, slurm=slurm)
    if (named := _by_index(token, runs_dir, only_sweeps=only_sweeps)) is not None:
        return open_run(named, slurm=slurm)
    runs = known_runs(runs_dir)
    sweeps = [run for run in runs if run.kind == "sweep"] if only_sweeps else runs
    for search, among in ((_by_id, runs), (_by_name, sweeps), (_by_job_id, runs), (_by_prefix, sweeps)):
        if (path := search(token, among)) is not None:
            return open_run(path, slurm=slurm)
    if (path := _by_unwritten_job_id(token, runs, slurm)) is not None:
        return open_run(path, slurm=slurm)
    if only_sweeps and (other := _by_name(token, runs) or _by_prefix(token, runs)) is not None:
        return open_run(other, slurm=slurm)
    raise RunNotFound(_not_found(token, runs, runs_dir or default_runs_dir()))


def _by_path(token: str) -> Path | None:
    run = RunDir(token) if os.sep in token else None
    return run.path if run is not None and run.record.exists() else None


def _by_index(token: str, runs_dir: Path | None, *, only_sweeps: bool) -> Path | None:
    """The run with this run ID, or the latest run of this name, according to the index or ``<runs_dir>/<name>``.

    Reads the folders of these runs only. The other searches look at all runs, which takes minutes on a shared file
    system if there are a million of them. None if this search does not find the run.
    """
    if os.sep in token or token.startswith("."):
        return None
    is_id = re.fullmatch(RUN_ID, token) is not None
    field = "run_id" if is_id else "name"
    paths = [line["path"] for line in index_lines() if line.get(field) == token and isinstance(line.get("path"), str)]
    if not is_id:
        paths += _folders(str((runs_dir or default_runs_dir()).absolute() / token))
    newest_first = sorted(dict.fromkeys(map(os.path.abspath, paths)), key=os.path.basename, reverse=True)
    for path in newest_first:
        try:
            record = read_record(RunDir(path))
        except (HpcaccelError, OSError):
            continue  # deleted, or damaged
        if os.path.basename(path) == token or (record.name == token and (record.kind == "sweep" or not only_sweeps)):
            return Path(path)
    return None


def _by_id(token: str, runs: list[FoundRun]) -> Path | None:
    base, _, index = token.partition("_")
    for run in runs:
        if run.run_id == token:
            return run.path
        if run.run_id == base and index.isdigit():
            parts = (RunDir(run.path).task(int(index)), SweepDir(run.path).trial(int(index)))
            return next((part.path for part in parts if part.record.exists()), None)
    return None


def _by_name(token: str, runs: list[FoundRun]) -> Path | None:
    return next((run.path for run in reversed(runs) if run.name == token), None)


def _by_job_id(token: str, runs: list[FoundRun]) -> Path | None:
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
            return run.path  # a worker is not a run
    return None


def _by_unwritten_job_id(token: str, runs: list[FoundRun], slurm: Slurm | None) -> Path | None:
    """Like :func:`_by_job_id`, for a job whose submit was interrupted before the job was recorded."""
    if not token.partition("_")[0].isdigit():
        return None
    unfinished = [run for run in runs if is_open(RunDir(run.path))]
    recover_now((RunDir(run.path) for run in unfinished), slurm=slurm)
    return _by_job_id(token, unfinished)


def _by_prefix(token: str, runs: list[FoundRun]) -> Path | None:
    matches = [run for run in runs if run.run_id.startswith(token)]
    if len(matches) > 1:
        raise RunNotFound(f"{token!r} matches {len(matches)} run IDs:\n{_listed(matches)}\nGive a longer prefix")
    return matches[0].path if matches else None


def _not_found(token: str, runs: list[FoundRun], runs_dir: Path) -> str:
    if not runs:
        return f"no run {token!r}: there are no runs yet (searched {runs_dir} and the run index)"
    words = {run.run_id: run for run in runs} | {run.name: run for run in runs}
    close = [words[word] for word in difflib.get_close_matches(token, words, n=_SHOWN, cutoff=0.6)]
    if close:
        return f"no run {token!r}. Similar runs:\n{_listed(list(dict.fromkeys(close)))}"
    return f"no run {token!r} among the {len(runs)} known runs. Latest runs:\n{_listed(runs[-_SHOWN:])}"


def _listed(runs: list[FoundRun]) -> str:
    return "\n".join(f"  {run.run_id}  {run.name}" for run in runs[-20:])


def known_runs(runs_dir: Path | None = None) -> list[FoundRun]:
    """The existing runs in the index and in ``runs_dir`` (default: the directory that submit would use).

    They are sorted from oldest to newest, without duplicates.
    """
    return KnownRuns(runs_dir).read()


class KnownRuns:
    """The known runs of a process that lists them repeatedly: each read returns the same objects for unchanged runs.

    Reading the index and the cache file of many runs anew each time would take seconds, and memory that is not
    returned to the system. Several threads may use an object.

    Args:
        runs_dir: searched in addition to this user's index. Default: the directory that submit would use.
    """

    def __init__(self, runs_dir: Path | None = None) -> None:
        self._runs_dir = runs_dir
        self._lock = threading.Lock()
        self._index = RunIndex()
        self._found: dict[str, tuple[str, FoundRun]] = {}
        """By path: the digest of the record's metadata when it was read, and the run."""
        self._is_first = True

    def read(self) -> list[FoundRun]:
        """The existing runs, as :func:`known_runs` returns them."""
        with self._lock:
            # The cache file holds the runs of earlier processes; a later read has only few new ones to look at.
            names = CachedOverview("names") if self._is_first else None
            self._is_first = False
            found: dict[tuple[int, int], tuple[str, str, FoundRun]] = {}
            for path in dict.fromkeys([*self._index.paths(), *_scanned(self._runs_dir or default_runs_dir())]):
                if (there := _identity(path)) is None or there in found:
                    continue
                if (known := self._look(path, names)) is not None:
                    found[there] = (path, *known)
            self._found = {path: (digest, known) for path, digest, known in found.values()}
        if names is not None:
            names.write()
        return sorted((known for _, _, known in found.values()), key=lambda known: known.run_id)

    def _look(self, path: str, names: CachedOverview | None) -> tuple[str, FoundRun] | None:
        """The digest of the record's metadata, and the run at ``path``; None if it was deleted or its record is
        damaged. No error, so that other runs are listed."""
        value = names.recall(path) if names is not None else None
        if names is not None and value is not None and isinstance(value.get("name"), str):
            name, kind, size = value["name"], value.get("kind", "run"), value.get("array_size")
            return names.digest_of(path), FoundRun(Path(path), os.path.basename(path), name, kind, size)
        run = RunDir(path)
        look = DirectoryStat(path, [run.record.name])
        digest, known = self._found.get(path, ("", None))
        if known is not None and digest == look.digest:
            return digest, known
        try:
            record = read_record(run)
        except (HpcaccelError, OSError):
            return None
        if names is not None:
            names.keep(look, {"name": record.name, "kind": record.kind, "array_size": record.array_size})
        # Without a digest it is read again by the next look: see SETTLING_SECONDS.
        digest = look.digest if look.is_settled else ""
        return digest, FoundRun(run.path, run.run_id, record.name, record.kind, record.array_size)


def _scanned(runs_dir: Path) -> Iterator[str]:
    """The paths ``<runs_dir>/<name>/<run_id>``."""
    for name in _folders(str(runs_dir.absolute())):
        yield from _folders(name)


def _folders(place: str) -> list[str]:
    try:
        return sorted(entry.path for entry in os.scandir(place) if not entry.name.startswith(".") and entry.is_dir())
    except OSError:
        return []


def _identity(path: str) -> tuple[int, int] | None:
    """Device and inode, which are the same for every path of a directory; None if there is no directory."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino
