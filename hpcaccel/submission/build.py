"""Writing a run directory: under a temporary name, so that nobody ever sees half a run, then renamed.

Whatever fails on the way, nothing is left behind, the folders included that were made above it. Only where Slurm does
not answer, and may have taken the job, the run stays.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import hpcaccel
from hpcaccel.core.progress_notes import counted
from hpcaccel.core.records import RunRecord, to_dict
from hpcaccel.core.run_dir import RunDir, append_line, atomic_write, fsync_directory, write_json
from hpcaccel.errors import RunDirectoryError, SlurmCommandError, SlurmUnreachable
from hpcaccel.spec import JobSpec, spec_hash, to_yaml
from hpcaccel.submission.calls import FUNCTION_FILE
from hpcaccel.submission.checkpoints import Origin, held
from hpcaccel.submission.code_copy import copy_code
from hpcaccel.submission.deferred_signals import undoing
from hpcaccel.submission.idempotent_resume import Turn
from hpcaccel.submission.loader_shield import FOLDER as LOADER_SHIELD
from hpcaccel.submission.loader_shield import write_loader_shield
from hpcaccel.submission.package import write_node_program
from hpcaccel.submission.prepare import Prepared, Task
from hpcaccel.submission.provenance import packages, submitted_from
from hpcaccel.submission.rank_side import FOLDER, write_rank_side

__all__ = ["all_or_nothing", "build", "made_in", "making", "new_record", "publish", "temporary"]


R = TypeVar("R", bound=RunDir)


@contextmanager
def all_or_nothing(run: RunDir) -> Iterator[None]:
    """A place for :func:`build` to fill. When the block fails it is removed, with the folders that were made for it.

    Raises:
        RunDirectoryError: it cannot be made; also in place of an error of the operating system's in the block, such
            as a full disk.
    """
    made = [folder for folder in (run.path.parent, *run.path.parent.parents) if not os.path.exists(folder)]
    place = temporary(run)
    try:
        place.create()
    except BaseException as error:
        _remove_empty(made)
        if isinstance(error, RunDirectoryError):
            raise RunDirectoryError(str(error).replace(str(place.path), str(run.path))) from None
        raise
    try:
        yield
    except SlurmCommandError as error:
        if run.submitting.exists() and not isinstance(error, SlurmUnreachable):
            raise _perhaps_taken(error, run) from None
        shutil.rmtree(run.path, ignore_errors=True)
        _remove_empty(made)
        raise
    except BaseException as error:
        # Once it is renamed, the place itself is gone. A run of that name which is not ours is never touched.
        shutil.rmtree(place.path if place.path.exists() else run.path, ignore_errors=True)
        _remove_empty(made)
        if isinstance(error, OSError):
            raise RunDirectoryError(
                f"cannot write the run directory {run.path}: {error.strerror or error}. Nothing was submitted. "
                "Choose another place with --runs-dir or HPCACCEL_RUNS_DIR"
            ) from error
        raise


def _perhaps_taken(error: SlurmCommandError, run: RunDir) -> SlurmCommandError:
    """Slurm did not answer: the run has to stay, since a job of it may be in the queue."""
    words = (
        f"{error.stderr.strip() or 'no answer'}\nWhether Slurm has taken the job is not known, and {run.run_id} is "
        f"kept: `hpcaccel status {run.run_id}` finds out once Slurm answers; the same command once more takes that job "
        "up, or submits anew where there is none"
    )
    return SlurmCommandError(error.command, error.returncode, words)


@contextmanager
def making(turn: Turn, *, indices: Sequence[int] | None, origin: Origin | None = None) -> Iterator[Callable[[], None]]:
    """A place for :func:`build` to fill, as of :func:`all_or_nothing`, with a note that it is about to be handed in.

    Args:
        indices: the tasks of an array, or the workers of a sweep.
        origin: the checkpoint that the run begins from, which is pinned.

    Yields:
        What is called when all is made: until then SIGTERM and SIGHUP undo it, then the hand-in holds them back.
    """
    run = turn.run
    with undoing() as is_made, held(origin, run_id=run.run_id), all_or_nothing(run):
        turn.begin(indices=indices, place=temporary(run))
        yield is_made


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, the innermost first, as far as they are there and empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue  # we did not come so far
        except OSError:
            return  # somebody else's run is in it by now


def build(prepared: Prepared) -> None:
    """Fill the run directory of ``prepared`` with all but its script and its job, inside of ``all_or_nothing``.

    Raises:
        RunDirectoryError, OSError: something cannot be copied or written.
    """
    place = temporary(prepared.run)
    if prepared.code is not None:
        copy_code(prepared.code, place.code)
    write_node_program(place.node_program)
    if prepared.tasks[0].spec.container is not None:
        write_rank_side(place.path / FOLDER)
    if any(task.launch["stop"] == "signals" for task in prepared.tasks):
        write_loader_shield(place.path / LOADER_SHIELD)
    place.submitit.mkdir(mode=0o750)
    if prepared.function is not None:
        atomic_write(place.submitit / FUNCTION_FILE, prepared.function, mode=0o600)
    record = new_record(prepared)
    _write_spec(place, prepared.tasks[0])
    if prepared.is_array:
        write_json(place.record, to_dict(replace(record, array_size=len(prepared.tasks))))
        for index, task in enumerate(counted(prepared.tasks, len(prepared.tasks), "tasks are made")):
            _build_task(place.task(index), task, index=index, prepared=prepared, record=record)
    else:
        write_json(place.record, to_dict(record))
    publish(prepared.run)


def publish(run: RunDir) -> None:
    """Let the directory appear, now that all is in it."""
    os.rename(temporary(run).path, run.path)
    fsync_directory(run.path.parent)


def _build_task(place: RunDir, task: Task, *, index: int, prepared: Prepared, record: RunRecord) -> None:
    place.create()
    run_id = prepared.run.task(index).run_id
    _write_spec(place, task)
    own = replace(record, run_id=run_id, spec_hash=spec_hash(task.spec), overrides=dict(task.overrides), packages={})
    write_json(place.record, to_dict(own), sync=False)
    parent = Path("..", "..")
    place.node_program.symlink_to(parent / place.node_program.name)
    place.script.symlink_to(parent / place.script.name)
    if prepared.code is not None:
        place.code.symlink_to(parent / place.code.name)
    place.submitit.mkdir(mode=0o750)
    if prepared.function is not None:
        (place.submitit / FUNCTION_FILE).symlink_to(Path("..", parent, place.submitit.name, FUNCTION_FILE))
    journal = place.path.parent.parent / place.journal.name
    append_line(journal, {"index": index, "overrides": task.overrides, "run_id": run_id})


def _write_spec(place: RunDir, task: Task) -> None:
    # One fsync a file would make a large array slow, and the whole directory appears by one rename.
    atomic_write(place.spec_yaml, _yaml(task.spec), sync=False)
    document = {
        "version": 1,
        "hash": spec_hash(task.spec),
        "spec": task.spec.model_dump(mode="json"),
        "launch": task.launch,
    }
    atomic_write(place.spec, json.dumps(document, indent=1, ensure_ascii=False) + "\n", sync=False)


def _yaml(spec: JobSpec) -> str:
    came_from = f" of {spec.source}" if spec.source is not None else ""
    return f"# The resolved spec{came_from}, with all defaults.\n{to_yaml(spec)}"


def new_record(prepared: Prepared) -> RunRecord:
    """What is known of a run before it is submitted."""
    return RunRecord(
        run_id=prepared.run.run_id,
        name=prepared.name,
        backend=prepared.backend.name,
        cluster=prepared.cluster,
        created=prepared.created,
        spec_hash=spec_hash(prepared.tasks[0].spec),
        hpcaccel_version=hpcaccel.__version__,
        python=f"{sys.version.split()[0]} {sys.executable}",
        packages=packages(),
        git_commit=None if prepared.git is None else prepared.git.commit,
        git_dirty=None if prepared.git is None else prepared.git.dirty,
        submitted_from=submitted_from(),
        branched_from=None if prepared.origin is None else prepared.origin.to_json(),
    )


def temporary(run: R) -> R:
    """Where a run or a sweep is made before its directory appears."""
    return type(run)(run.path.with_name(f".{run.path.name}.tmp"))


def made_in(place: Path) -> RunDir | None:
    """The run that is being made in ``place``; None where that is no such place."""
    match = re.fullmatch(r"\.(\d{8}-\d{6}-[0-9a-f]{4})\.tmp", place.name)
    return None if match is None else RunDir(place.with_name(match[1]))
