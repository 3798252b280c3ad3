"""The directory of a trial: a run's, but for the code and the batch step's program, which are the sweep's."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir, SweepDir, atomic_write, fsync_directory, write_json
from hpcaccel.errors import RunDirectoryError
from hpcaccel.spec import JobSpec, spec_hash, to_yaml
from hpcaccel.submission.run_state import read_record
from hpcaccel.sweeps.definition import Definition
from hpcaccel.sweeps.packing import share

__all__ = ["make_trial"]


def make_trial(
    sweep: SweepDir, number: int, *, definition: Definition, job: JobSpec, overrides: Mapping[str, Any]
) -> RunDir:
    """Write ``trials/<number>``, whole or not at all; one that is there is left as it is.

    Args:
        job: the trial's spec.
        overrides: what it has of its own, for people.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    trial = sweep.trial(number)
    place = RunDir(sweep.trials / f".{number}.{os.getpid()}.tmp")
    if trial.spec.exists():
        return trial
    try:
        shutil.rmtree(place.path, ignore_errors=True)
        place.create()
        _fill(place, definition, job, number)
        record = read_record(sweep)
        own = replace(
            record,
            kind="run",
            run_id=trial.run_id,
            created=time.time(),
            spec_hash=spec_hash(share(job, definition.spec.sweep.pack)),
            array_size=None,
            job_ids=[],
            packages={},
            overrides=dict(overrides),
        )
        write_json(place.record, to_dict(own), sync=False)
        _publish(place, trial)
    except OSError as error:
        shutil.rmtree(place.path, ignore_errors=True)
        raise RunDirectoryError(f"cannot write trial {number} to {trial.path}: {error.strerror or error}") from error
    return trial


def _fill(place: RunDir, definition: Definition, job: JobSpec, number: int) -> None:
    part = share(job, definition.spec.sweep.pack)
    atomic_write(place.spec_yaml, f"# Trial {number}: the resolved spec.\n{to_yaml(part)}", sync=False)
    document = json.dumps(definition.document_of(job), indent=1, ensure_ascii=False)
    atomic_write(place.spec, document + "\n")  # whoever finds it takes the trial for written


def _publish(place: RunDir, trial: RunDir) -> None:
    """Let it appear; somebody else's of the same number is as good."""
    try:
        os.rename(place.path, trial.path)
    except OSError:
        if not trial.spec.exists():
            raise
        shutil.rmtree(place.path, ignore_errors=True)
        return
    fsync_directory(trial.path.parent)
