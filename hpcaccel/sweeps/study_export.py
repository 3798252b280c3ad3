"""A copy of a sweep's study in an SQLite file, for Optuna's own tools and for optuna-dashboard."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

from hpcaccel.core.durable_files import atomic_writer
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import UserError
from hpcaccel.sweeps.sweep_overview import Study

__all__ = ["check_target", "export_study"]

_OPEN = ("-journal", "-wal")
"""Suffixes of the files that SQLite keeps beside a database while a program writes to it."""


def check_target(out: Path, *, force: bool) -> Path:
    """The absolute path of ``out``, if a study may be written there.

    Raises:
        UserError: the directory does not exist, ``out`` exists and ``force`` is false, or another program is writing to
            the database ``out``.
    """
    out = out.expanduser().absolute()
    if not out.parent.is_dir():
        raise UserError(f"the directory {out.parent} does not exist: create it, or choose another --out")
    if out.is_dir():
        raise UserError(f"{out} is a directory: give the name of a file, such as {out.name}/study.db")
    if out.exists() and not force:
        raise UserError(f"{out} exists already: choose another --out, or replace it with --force")
    for beside in (out.with_name(out.name + suffix) for suffix in _OPEN):
        if beside.exists():
            raise UserError(
                f"{beside} exists, so another program, such as optuna-dashboard, is writing to {out.name}: close it "
                "first, or choose another --out"
            )
    return out


def export_study(sweep: SweepDir, out: Path, *, name: str, force: bool = False) -> tuple[Path, int]:
    """Write all trials of a sweep to an SQLite database that ``optuna.load_study`` opens.

    The numbers of the trials are those of the sweep, so trials that hpcaccel discarded are included (state ``FAIL``).
    The sweep may be running: the copy has the trials that its journal had when the export began. The sweep's own files
    are only read. ``out`` appears whole or not at all.

    Args:
        name: name of the study in the database.
        force: whether to replace an existing file.

    Returns:
        The absolute path of ``out``, and the number of trials.

    Raises:
        UserError: Optuna is not installed, the sweep has no trial yet, or ``out`` cannot be written (see
            :func:`check_target`).
        RunDirectoryError: ``sweep`` is not a sweep directory.
    """
    out = check_target(out, force=force)
    metrics = list(Study(sweep).goal.metrics)
    if importlib.util.find_spec("optuna") is None:
        raise UserError(f"sweep export needs Optuna, which is not installed for {sys.executable}: pip install optuna")
    with tempfile.TemporaryDirectory(prefix="hpcaccel-export-") as folder:
        # SQLite locks its file, which shared file systems may not support: the database is made on a local disk.
        made = Path(folder) / "study.db"
        count = _copy(sweep, made, name=name, metrics=metrics)
        with made.open("rb") as content, atomic_writer(out) as file:
            shutil.copyfileobj(content, file)
    return out, count


def _copy(sweep: SweepDir, made: Path, *, name: str, metrics: list[str]) -> int:
    import optuna
    from optuna.storages import JournalStorage, RDBStorage

    from hpcaccel.sweeps.journal import Journal
    from hpcaccel.sweeps.study import STUDY_NAME

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.load_study(study_name=STUDY_NAME, storage=JournalStorage(Journal(sweep.journal)))
    except KeyError:
        raise UserError(
            f"sweep {sweep.run_id} has no trial yet: export it after its first worker has started"
        ) from None
    storage = RDBStorage(f"sqlite:///{made}")
    try:
        with storage.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA synchronous=OFF")  # the file is synced as a whole at the end
        copy = optuna.create_study(storage=storage, study_name=name, directions=study.directions)
        for key, value in {**study.user_attrs, "sweep": sweep.run_id, "directory": str(sweep.path)}.items():
            copy.set_user_attr(key, value)
        copy.set_user_attr("exported", time.time())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna marks names of metrics as experimental
            copy.set_metric_names(metrics)
        trials = study.get_trials(deepcopy=False)
        for trial in trials:
            storage.create_new_trial(copy._study_id, template_trial=trial)
    finally:
        storage.remove_session()
        storage.engine.dispose()
    return len(trials)
