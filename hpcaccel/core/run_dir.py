"""The run directory: the contract between the login node, the batch step and the ranks.

Every path and file name of a run stands here and nowhere else, with the few ways in which its files are written:
JSON files atomically (temporary name, fsync, rename), JSON-lines files by appending whole lines, so that a reader
never sees half a file and a torn last line costs only itself.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcaccel.errors import RunDirectoryError, UserError

__all__ = [
    "FILE_MODE",
    "MOVED",
    "RunDir",
    "SweepDir",
    "WorkerDir",
    "append_bytes",
    "append_line",
    "atomic_write",
    "default_runs_dir",
    "fsync_directory",
    "index_lines",
    "make_folder",
    "new_run_id",
    "read_json",
    "read_lines",
    "register",
    "state_home",
    "write_json",
]

DIRECTORY_MODE = 0o750
PRIVATE_MODE = 0o600
FILE_MODE = 0o640
MOVED = "the run directory is not there any more (was it moved or deleted?)"
_NO_SYNC = {errno.EBADF, errno.EINVAL, errno.ENOTSUP}


def new_run_id(now: float | None = None) -> str:
    """A sortable id such as ``20261120-153012-4f2a`` (local time and four random hex digits)."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + "-" + os.urandom(2).hex()


def default_runs_dir(profile_runs_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where run directories are made: ``HPCACCEL_RUNS_DIR``, the profile's, or ``./runs``; absolute."""
    chosen = os.environ.get("HPCACCEL_RUNS_DIR") or profile_runs_dir or "runs"
    return _absolute(Path(os.path.expanduser(chosen)))


def _absolute(path: Path) -> Path:
    """Raises UserError for a path below a current directory that has gone."""
    try:
        return path.absolute()
    except FileNotFoundError:
        raise UserError(
            f"{path} is below the current directory, which does not exist any more: change into another one"
        ) from None


def fsync_directory(path: Path) -> None:
    """Make a rename in ``path`` durable. File systems that do not know how to sync a directory need no sync."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)


def atomic_write(path: Path, content: str | bytes, *, mode: int = FILE_MODE, sync: bool = True) -> None:
    """Write ``path`` so that a reader sees old content or new, with ``sync`` after a crash of the machine too."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(3).hex()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        fsync_directory(path.parent)


def make_folder(path: Path, *, within: Path | None = None, mode: int = DIRECTORY_MODE) -> None:
    """Make a folder, and those above it, where they are not there yet; but never a run directory anew that somebody has
    moved away.

    Args:
        within: the run directory; by default that of this rank, where it is one's.

    Raises:
        OSError: the folder cannot be made; FileNotFoundError where the run directory is not there.
    """
    run = within or os.environ.get("HPCACCEL_RUN_DIR")
    if run and Path(path).is_relative_to(run) and not os.path.isdir(run):
        raise FileNotFoundError(errno.ENOENT, MOVED, str(run))
    path.mkdir(mode=mode, parents=True, exist_ok=True)


def write_json(path: Path, value: Mapping[str, Any], *, mode: int = FILE_MODE, sync: bool = True) -> None:
    atomic_write(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", mode=mode, sync=sync)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``, or None where there is no such file.

    Raises:
        RunDirectoryError: the file is not a JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RunDirectoryError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path} does not hold a JSON object")
    return value


def append_line(path: Path, value: Mapping[str, Any], *, sync: bool = False) -> None:
    """Append one JSON line. A torn line that a crash left is closed first, so that it spoils nothing but itself.

    Args:
        sync: fsync before returning; for lines that must survive what comes next.
    """
    append_bytes(path, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n", sync=sync)


def append_bytes(path: Path, lines: bytes, *, sync: bool = False) -> None:
    """Append whole lines, as ``append_line`` does."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, FILE_MODE)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            lines = b"\n" + lines
        while lines:  # a disk that fills up takes a part of them, and says so only when asked again
            lines = lines[os.write(fd, lines) :]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def read_lines(path: Path, *, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """The objects of a JSON-lines file, each with the byte offset behind it (where a later reader goes on).

    Lines that are torn or no JSON objects are passed over; an unfinished last line is left for the next reader.
    """
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    with file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            offset += len(raw)
            try:
                value = json.loads(raw)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value, offset


class RunDir:
    """The names inside one run directory. Building one touches no file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _absolute(Path(path))

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def run_id(self) -> str:
        """The id: the folder's name; for a task of an array ``<array id>_<index>``, as Slurm writes it, and for a trial
        of a sweep ``<sweep id>_<number>``."""
        if self.is_task or self.is_trial:
            return f"{self.path.parent.parent.name}_{self.path.name}"
        return self.path.name

    @property
    def is_task(self) -> bool:
        return self.path.parent.name == "tasks"

    @property
    def is_trial(self) -> bool:
        return self.path.parent.name == "trials"

    @property
    def is_worker(self) -> bool:
        return self.path.parent.name == "workers"

    @property
    def _submitted(self) -> Path:
        """Where what was submitted lies: a trial runs its sweep's code, of which there is one copy for all."""
        return self.path.parent.parent if self.is_trial else self.path

    @property
    def spec_yaml(self) -> Path:
        return self.path / "spec.yaml"

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def code(self) -> Path:
        return self._submitted / "code"

    @property
    def record(self) -> Path:
        return self.path / "record.json"

    @property
    def lease(self) -> Path:
        return self.path / "lease.json"

    @property
    def submitting(self) -> Path:
        """There while the script is handed in; left by a submit or a resume that was killed meanwhile."""
        return self.path / "submitting.json"

    @property
    def resuming(self) -> Path:
        """What ``submitting`` of a resume was called by earlier releases."""
        return self.path / "resuming.json"

    @property
    def ledger(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def excluded_nodes(self) -> Path:
        """Nodes that the run keeps away from, and why."""
        return self.path / "excluded_nodes.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def foreign_metrics(self, attempt: int) -> Path:
        """``$HPCACCEL_METRICS`` of rank 0: a program in any language appends JSON lines (see ``metrics_reader``)."""
        return self.attempt(attempt) / "metrics.jsonl"

    @property
    def trackers(self) -> Path:
        """Where trackers that need a directory write, when the script names none."""
        return self.path / "trackers"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def submitit(self) -> Path:
        return self.path / "submitit"

    @property
    def call(self) -> Path:
        """What a rank of a callable runs, pickled before any job has a number; submitit opens it by the job's."""
        return self.submitit / "call.pkl"

    @property
    def node_program(self) -> Path:
        """The batch step's program, a zip of base and ``node``: a copy, so that an upgrade leaves queued jobs alone."""
        return self._submitted / "node.pyz"

    @property
    def slurm_log(self) -> Path:
        """What the batch script itself printed (module loads, setup lines, a supervisor that could not start)."""
        return self.path / "slurm.log"

    @property
    def local_process(self) -> Path:
        """Only on the local backend: which process is the job (its id, pid and start time)."""
        return self.path / "local.json"

    @property
    def local_driver(self) -> Path:
        """Only in the parent folder of an array on the local backend: the script that starts its tasks in turn."""
        return self.path / "local-array.sh"

    @property
    def journal(self) -> Path:
        """Only in the parent folder of an array: one line a task, with its overrides; and of a sweep: its study."""
        return self.path / "journal.jsonl"

    @property
    def tasks(self) -> Path:
        return self.path / "tasks"

    def task(self, index: int) -> RunDir:
        return RunDir(self.tasks / str(index))

    def attempt(self, number: int) -> Path:
        return self.attempts / str(number)

    def outcome(self, attempt: int) -> Path:
        return self.attempt(attempt) / "outcome.json"

    def stop(self, attempt: int) -> Path:
        """Why this attempt's ranks are asked to stop; written by the supervisor before it signals them."""
        return self.attempt(attempt) / "stop.json"

    def progress(self, attempt: int) -> Path:
        """Where this attempt resumed and how many steps it will take; written by rank 0 when its loop starts."""
        return self.attempt(attempt) / "progress.json"

    def step_counter(self, attempt: int) -> Path:
        """The last step that rank 0 has done, and when: ``120 1795357046.314375``, twice. Overwritten in place; lines
        that differ are half written."""
        return self.attempt(attempt) / "step"

    def timing(self, attempt: int) -> Path:
        """What this attempt's time went into; written by rank 0 now and then."""
        return self.attempt(attempt) / "timing.json"

    def saves(self, attempt: int) -> Path:
        """A line, a ``records.Save``, for each checkpoint that this attempt has committed: step, reason, bytes, for how
        long the training stood still, when it was safe. Written by rank 0."""
        return self.attempt(attempt) / "saves.jsonl"

    def signalled(self, attempt: int) -> Path:
        """The ranks have heard a signal and ask the supervisor what it means."""
        return self.control / f"signal-{attempt}"

    def last_word(self, attempt: int) -> Path:
        """Why the ranks could not go on together; written by the one that found out."""
        return self.attempt(attempt) / "last_word.txt"

    def heartbeats(self, attempt: int) -> Path:
        """A folder with a sign of life of each rank (``records.Beat``)."""
        return self.attempt(attempt) / "heartbeats"

    def stacks(self, attempt: int) -> Path:
        """A folder in which each rank writes where all its threads are, when it is asked (``asked``) or has hung."""
        return self.attempt(attempt) / "stacks"

    def hang(self, attempt: int) -> Path:
        """Which rank kept the others waiting, when the attempt was given up for it; written by the supervisor."""
        return self.attempt(attempt) / "hang.json"

    def stragglers(self, attempt: int) -> Path:
        """Ranks that take longer for their own part of a step than the others; a line whenever that changes."""
        return self.attempt(attempt) / "stragglers.jsonl"

    def supervisor_log(self, attempt: int) -> Path:
        return self.attempt(attempt) / "supervisor.log"

    def rank_log(self, attempt: int, rank: int | str) -> Path:
        return self.attempt(attempt) / f"{rank}.log"

    def create(self) -> None:
        """Make the directory and its folders.

        Raises:
            RunDirectoryError: it exists already or cannot be made.
        """
        try:
            self.path.mkdir(parents=True, mode=DIRECTORY_MODE, exist_ok=False)
            for folder in (self.attempts, self.control, self.checkpoints):
                folder.mkdir(mode=DIRECTORY_MODE)
        except OSError as error:
            raise _cannot_make(self.path, error) from None


class SweepDir(RunDir):
    """The names inside a sweep's directory: a run directory with workers and trials in place of attempts."""

    @property
    def spec_yaml(self) -> Path:
        return self.path / "sweep.yaml"

    @property
    def spec(self) -> Path:
        return self.sweep

    @property
    def tasks(self) -> Path:
        """A sweep's array is that of its workers."""
        return self.workers

    def task(self, index: int) -> RunDir:
        return self.worker(index)

    @property
    def sweep(self) -> Path:
        """The resolved spec, the sweep's section, and how a worker's chooser is started."""
        return self.path / "sweep.json"

    @property
    def workers(self) -> Path:
        return self.path / "workers"

    def worker(self, index: int) -> WorkerDir:
        return WorkerDir(self.workers / str(index))

    def worker_indices(self) -> list[int]:
        """Of the workers that have a folder, in order."""
        return _numbered(self.workers)

    @property
    def trials(self) -> Path:
        return self.path / "trials"

    def trial(self, number: int) -> RunDir:
        return RunDir(self.trials / str(number))

    def trial_numbers(self) -> list[int]:
        """Of the trials that have a folder, in order."""
        return _numbered(self.trials)

    def create(self) -> None:
        """Make the directory and its folders; raises as for a run."""
        try:
            self.path.mkdir(parents=True, mode=DIRECTORY_MODE, exist_ok=False)
            for folder in (self.workers, self.trials, self.control):
                folder.mkdir(mode=DIRECTORY_MODE)
        except OSError as error:
            raise _cannot_make(self.path, error) from None


class WorkerDir(RunDir):
    """One worker's folder. It has a lease, a control folder and logs, as a run has."""

    @property
    def index(self) -> int:
        return int(self.path.name)

    @property
    def sweep(self) -> SweepDir:
        return SweepDir(self.path.parent.parent)

    @property
    def run_id(self) -> str:
        return f"{self.path.parent.parent.name}_w{self.path.name}"

    @property
    def spec(self) -> Path:
        return self.sweep.spec

    @property
    def script(self) -> Path:
        return self.sweep.script

    @property
    def node_program(self) -> Path:
        return self.sweep.node_program

    @property
    def account(self) -> Path:
        """When this worker had an allocation, and how large: ``records.WorkerStart``, ``WorkerSeen`` and ``WorkerEnd``,
        a line each. Written by the worker's host."""
        return self.path / "worker.jsonl"

    @property
    def job_answer(self) -> Path:
        """What the scheduler last told the host of its job, for the supervisors of trials."""
        return self.path / "job.json"

    @property
    def host_log(self) -> Path:
        """What the host did and why, and what the chooser printed."""
        return self.path / "host.log"

    def prepare(self) -> None:
        """Make the folders, where they are not there yet."""
        for folder in (self.path, self.control):
            make_folder(folder, within=self.sweep.path)


def _cannot_make(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"cannot make the run directory {path}: {error.strerror}. "
        "Choose another place with --runs-dir or HPCACCEL_RUNS_DIR"
    )


def _numbered(folder: Path) -> list[int]:
    try:
        return sorted(int(entry.name) for entry in os.scandir(folder) if entry.name.isdecimal())
    except (FileNotFoundError, NotADirectoryError):
        return []


# -- the index: finds runs from any directory ---------------------------------------------------------------------


def state_home() -> Path:
    """Where programs keep what they remember of this user: ``XDG_STATE_HOME``, or ``~/.local/state``."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state"))


def _index_path() -> Path:
    return state_home() / "hpcaccel" / "runs.jsonl"


def register(run: RunDir, *, name: str, job_id: str) -> None:
    """Remember a run in the user's index. A state directory that cannot be written only costs the finding."""
    path = _index_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        append_line(path, {"run_id": run.run_id, "name": name, "job_id": job_id, "path": str(run.path)})
    except OSError:
        return


def index_lines() -> list[dict[str, Any]]:
    """All remembered runs, oldest first; ``run_id``, ``name``, ``job_id`` and ``path`` of each."""
    return [line for line, _ in read_lines(_index_path())]
