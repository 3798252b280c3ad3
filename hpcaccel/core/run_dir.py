"""Names and paths of the files in a run directory (the contract between login node, batch step and ranks)."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpcaccel.core.durable_files import DIRECTORY_MODE, same_sharing
from hpcaccel.errors import RunDirectoryError, UserError

__all__ = [
    "RUN_DIR",
    "RUN_ID",
    "RunDir",
    "cannot_make",
    "default_runs_dir",
    "new_run_id",
    "numbered_folders",
    "state_home",
]

RUN_DIR = "{run_dir}"
"""Placeholder for the run's directory, in the program's arguments and in ``LaunchWatch.glob``."""
RUN_ID = r"\d{8}-\d{6}-[0-9a-f]{4}"
"""Pattern of ``new_run_id``."""


def new_run_id(now: float | None = None) -> str:
    """A sortable id such as ``20261120-153012-4f2a`` (local time and four random hex digits)."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + "-" + os.urandom(2).hex()


def default_runs_dir(profile_runs_dir: str | os.PathLike[str] | None = None) -> Path:
    """Absolute path of the folder for new run directories: ``HPCACCEL_RUNS_DIR`` if it is set, else
    ``profile_runs_dir``, else ``./runs``."""
    chosen = os.environ.get("HPCACCEL_RUNS_DIR") or profile_runs_dir or "runs"
    return _absolute(Path(os.path.expanduser(chosen)))


def _absolute(path: Path) -> Path:
    """The absolute path. Raises UserError for a relative path if the current directory was deleted."""
    try:
        return path.absolute()
    except FileNotFoundError:
        raise UserError(
            f"{path} cannot be resolved: the current directory no longer exists. Change to another directory"
        ) from None


class RunDir:
    """Paths inside one run directory. The constructor accesses no file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _absolute(Path(path))

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def run_id(self) -> str:
        """The folder's name; ``<array id>_<index>``, as in Slurm, for a task of an array, and ``<sweep id>_<number>``
        for a trial of a sweep."""
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
        """The directory with the code and the node program: for a trial, that of its sweep."""
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
        """Exists while a script is being submitted. The file remains if the submit or resume is killed."""
        return self.path / "submitting.json"

    @property
    def resuming(self) -> Path:
        """File that earlier releases used for a resume in place of ``submitting``."""
        return self.path / "resuming.json"

    @property
    def ledger(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def excluded_nodes(self) -> Path:
        """File with the nodes that the run has excluded, each with the reason and the end of the exclusion."""
        return self.path / "excluded_nodes.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def foreign_metrics(self, attempt: int) -> Path:
        """``$HPCACCEL_METRICS`` of rank 0: a program in any language appends JSON lines (see ``metrics_reader``)."""
        return self.attempt(attempt) / "metrics.jsonl"

    @property
    def trackers(self) -> Path:
        """Default directory of trackers that need one."""
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
        """The pickled call for the ranks of a callable. It is written before the job has an id, whereas submitit names
        its file after the job id."""
        return self.submitit / "call.pkl"

    @property
    def node_program(self) -> Path:
        """The batch step's program, a zip of ``node`` and the modules that it imports. Queued jobs run this copy, so
        that upgrades do not affect them."""
        return self._submitted / "node.pyz"

    @property
    def slurm_log(self) -> Path:
        """Output of the batch script (module loads, setup lines, a supervisor that could not start)."""
        return self.path / "slurm.log"

    @property
    def local_process(self) -> Path:
        """Only on the local backend: the job's id, and pid and start time of the job's process."""
        return self.path / "local.json"

    @property
    def local_driver(self) -> Path:
        """Only in the parent folder of an array on the local backend: the script that runs its tasks one by one."""
        return self.path / "local-array.sh"

    @property
    def journal(self) -> Path:
        """Only in the directory of an array (one line per task, with its overrides) or of a sweep (the study)."""
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
        """Why this attempt's ranks must stop (``StopRequest``); written by the supervisor before it signals them."""
        return self.attempt(attempt) / "stop.json"

    def progress(self, attempt: int) -> Path:
        """The step that this attempt resumed from and the total number of steps (``Progress``); written by rank 0."""
        return self.attempt(attempt) / "progress.json"

    def step_counter(self, attempt: int) -> Path:
        """Step and time of rank 0's last step in binary, see ``step_counter.FORMAT``. Overwritten in place."""
        return self.attempt(attempt) / "step"

    def timing(self, attempt: int) -> Path:
        """How this attempt's time was spent (``Timing``); updated by rank 0 during the attempt."""
        return self.attempt(attempt) / "timing.json"

    def imports(self, attempt: int) -> Path:
        """Modules that rank 0 had imported at its first step, for warm parents (``node.warm.preload``)."""
        return self.attempt(attempt) / "imports.json"

    def saves(self, attempt: int) -> Path:
        """A ``rank_records.Save`` line for each committed checkpoint of this attempt; written by rank 0."""
        return self.attempt(attempt) / "saves.jsonl"

    def signalled(self, attempt: int) -> Path:
        """Marker file: a rank has received a signal, and the supervisor must write the reason for the stop."""
        return self.control / f"signal-{attempt}"

    def abort_reason(self, attempt: int) -> Path:
        """Why a rank aborted a collective; written by that rank, for ranks that only get a connection error."""
        return self.attempt(attempt) / "last_word.txt"

    def heartbeats(self, attempt: int) -> Path:
        """Folder with each rank's last heartbeat (``rank_records.Beat``)."""
        return self.attempt(attempt) / "heartbeats"

    def stacks(self, attempt: int) -> Path:
        """Folder in which each rank dumps the stacks of its threads: on request or during a hang."""
        return self.attempt(attempt) / "stacks"

    def hang(self, attempt: int) -> Path:
        """The hang because of which the supervisor ended the attempt (``Hang``)."""
        return self.attempt(attempt) / "hang.json"

    def stragglers(self, attempt: int) -> Path:
        """Ranks that are slower than the others; one line per change."""
        return self.attempt(attempt) / "stragglers.jsonl"

    def samples(self, attempt: int) -> Path:
        """Folder with a file for each node: use of CPUs, memory and GPUs (``samples.Sample``); the samplers' log."""
        return self.attempt(attempt) / "samples"

    def sample_file(self, attempt: int, node: str) -> Path:
        return self.samples(attempt) / f"{node}.jsonl"

    def supervisor_log(self, attempt: int) -> Path:
        return self.attempt(attempt) / "supervisor.log"

    def rank_log(self, attempt: int, rank: int | str) -> Path:
        return self.attempt(attempt) / f"{rank}.log"

    def create(self) -> None:
        """Create the directory and its folders.

        Raises:
            RunDirectoryError: the directory exists already or cannot be created.
        """
        try:
            self.path.mkdir(parents=True, mode=DIRECTORY_MODE, exist_ok=False)
            for folder in (self.attempts, self.control, self.checkpoints):
                folder.mkdir(mode=DIRECTORY_MODE)
            same_sharing(self.control, like=RunDir(self.path.parent.parent).control)  # of the array or sweep
        except OSError as error:
            raise cannot_make(self.path, error) from None


def cannot_make(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"cannot create the run directory {path}: {error.strerror}. "
        "Choose another location with --runs-dir or HPCACCEL_RUNS_DIR"
    )


def numbered_folders(folder: Path) -> list[int]:
    try:
        return sorted(int(entry.name) for entry in os.scandir(folder) if entry.name.isdecimal())
    except (FileNotFoundError, NotADirectoryError):
        return []


def state_home() -> Path:
    """``XDG_STATE_HOME``, or ``~/.local/state``."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state"))
