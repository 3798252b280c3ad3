"""The directory of a new run: created under a temporary name, renamed when complete, removed if anything fails.

A failure leaves nothing behind, not even the parent directories that were created. The run is kept only if Slurm may
have accepted the job.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import hpcaccel
from hpcaccel.core.durable_files import append_line, atomic_write, fsync_directory, write_json
from hpcaccel.core.progress_notes import show_progress
from hpcaccel.core.records import RunRecord, to_dict
from hpcaccel.core.registered_runs import register
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunDirectoryError
from hpcaccel.spec import JobSpec, spec_hash, to_yaml
from hpcaccel.submission.calls import FUNCTION_FILE
from hpcaccel.submission.code.code_copy import copy_code
from hpcaccel.submission.code.package import (
    LOADER_SHIELD,
    RANK_SIDE,
    TRAINER_BRIDGE,
    write_node_program,
    write_rank_side,
    write_sitecustomize,
)
from hpcaccel.submission.code.provenance import packages, submitted_from
from hpcaccel.submission.jobs.critical_section import raise_on_signals
from hpcaccel.submission.jobs.job_submission import JobSubmission, may_have_job, temporary
from hpcaccel.submission.runs.checkpoints import Origin, held
from hpcaccel.submission.submit.idempotent import Always, Once
from hpcaccel.submission.submit.prepare import PreparedSubmission, Task
from hpcaccel.submission.submit.sharing import SharedGroup, group_umask, let_group_read, share

__all__ = ["all_or_nothing", "build", "copy_programs", "new_record", "new_run", "publish"]


@contextmanager
def new_run(
    run: RunDir,
    build: Callable[[], None],
    *,
    name: str,
    once: Once | Always,
    indices: Sequence[int] | None,
    origin: Origin | None = None,
    group: SharedGroup | None = None,
) -> Iterator[JobSubmission]:
    """Create the directory of a run or sweep; the block then submits its job. If either fails, both are undone.

    The run is kept if Slurm may have accepted the job. Until the directory is complete, SIGTERM and SIGHUP also undo
    the creation; the submission then defers these signals.

    Args:
        build: fills ``temporary(run)`` and calls :func:`publish`.
        once: the key of the submission.
        indices: the tasks of an array, or the workers of a sweep.
        origin: the checkpoint from which the run starts; it is pinned.
        group: the group that the run is shared with.

    Yields:
        The submission, whose intent has been written.

    Raises:
        RunDirectoryError: the directory cannot be written.
    """
    once.begin(run)
    with (
        group_umask(group),
        JobSubmission(run) as submission,
        raise_on_signals() as restore_handlers,
        held(origin, run_id=run.run_id),
        all_or_nothing(run, group=group),
    ):
        submission.write_intent(indices=indices, place=temporary(run))
        build()
        if group is not None:
            let_group_read(run.code)
        restore_handlers()
        register(run, name=name, job_id="")  # the run can be found even if the submission is killed
        yield submission


@contextmanager
def all_or_nothing(run: RunDir, *, group: SharedGroup | None = None) -> Iterator[None]:
    """Create ``temporary(run)`` for the block to fill. On failure, remove the folder and the parents created for it.

    After the rename, the directory is kept if Slurm may have accepted the job.

    Raises:
        RunDirectoryError: the folder cannot be created, or the block raised an OSError, such as a full disk.
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
        if group is not None:
            share(place, group, parents=made)
        yield
    except BaseException as error:
        if may_have_job(error) and run.submitting.exists():
            raise
        # If `place` is gone, it was renamed to run.path. If not, run.path may be a run of another process.
        shutil.rmtree(place.path if place.path.exists() else run.path, ignore_errors=True)
        _remove_empty(made)
        if isinstance(error, OSError):
            raise RunDirectoryError(
                f"cannot write the run directory {run.path}: {error.strerror or error}. Nothing was submitted. "
                "Choose another directory with --runs-dir or HPCACCEL_RUNS_DIR"
            ) from error
        raise


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove the folders that exist and are empty, innermost first."""
    for folder in folders:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue  # the folder was not created
        except OSError:
            return  # the folder contains another run


def build(prepared: PreparedSubmission) -> None:
    """Fill ``temporary(prepared.run)`` with all files except the script, which is written later, and publish it.

    Raises:
        RunDirectoryError, OSError: something cannot be copied or written.
    """
    place = temporary(prepared.run)
    copy_programs(place, prepared)
    if prepared.function is not None:
        atomic_write(place.submitit / FUNCTION_FILE, prepared.function, mode=0o600)
    record = new_record(prepared)
    _write_spec(place, prepared.tasks[0])
    if prepared.is_array:
        write_json(place.record, to_dict(replace(record, array_size=len(prepared.tasks))))
        for index, task in enumerate(show_progress(prepared.tasks, len(prepared.tasks), "tasks created")):
            _build_task(place.task(index), task, index=index, prepared=prepared, record=record)
    else:
        write_json(place.record, to_dict(record))
    publish(prepared.run)


def copy_programs(place: RunDir, prepared: PreparedSubmission) -> None:
    """Copy the user's code and the parts of hpcaccel that the run uses, and create the folder of submitit's pickles.

    Raises:
        RunDirectoryError, OSError: something cannot be copied or written.
    """
    if prepared.code is not None:
        copy_code(prepared.code, place.code)
    write_node_program(place.node_program)
    if prepared.tasks[0].spec.container is not None:
        write_rank_side(place.path / RANK_SIDE)
    if any(task.launch.stop == "signals" for task in prepared.tasks):
        write_sitecustomize(place.path, LOADER_SHIELD)
    if any(task.launch.bridge is not None for task in prepared.tasks):
        write_sitecustomize(place.path, TRAINER_BRIDGE)
    place.submitit.mkdir(mode=0o750)


def publish(run: RunDir) -> None:
    """Rename the complete temporary directory to the run's directory."""
    os.rename(temporary(run).path, run.path)
    fsync_directory(run.path.parent)


def _build_task(place: RunDir, task: Task, *, index: int, prepared: PreparedSubmission, record: RunRecord) -> None:
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
    # No fsync per file: it would be slow for a large array, and one rename publishes the whole directory.
    atomic_write(place.spec_yaml, _yaml(task.spec), sync=False)
    document = {
        "version": 1,
        "hash": spec_hash(task.spec),
        "spec": task.spec.model_dump(mode="json"),
        "launch": task.launch.to_dict(),
    }
    atomic_write(place.spec, json.dumps(document, indent=1, ensure_ascii=False) + "\n", sync=False)


def _yaml(spec: JobSpec) -> str:
    origin = f" of {spec.source}" if spec.source is not None else ""
    return f"# The resolved spec{origin}, with all defaults.\n{to_yaml(spec)}"


def new_record(prepared: PreparedSubmission) -> RunRecord:
    """The record of a run before it is submitted."""
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
