"""What a shell offers for the name of a run, once ``hpcaccel --install-completion`` was called."""

from __future__ import annotations

__all__ = ["checkpoint_names", "run_names", "sweep_names"]

MOST_IDS = 50


def run_names(incomplete: str) -> list[tuple[str, str]]:
    """Names first, then ids, the newest first, each with what a shell may show beside it."""
    return _offered(incomplete, only_sweeps=False)


def sweep_names(incomplete: str) -> list[tuple[str, str]]:
    return _offered(incomplete, only_sweeps=True)


def checkpoint_names(incomplete: str) -> list[tuple[str, str]]:
    """Runs; behind an ``@`` the steps of the run's checkpoints."""
    run, at, step = incomplete.partition("@")
    if not at:
        return run_names(incomplete)
    from hpcaccel import checkpoint_files
    from hpcaccel.errors import HpcaccelError
    from hpcaccel.submission.find import find_run

    try:
        found = checkpoint_files.step_directories(find_run(run).dir.checkpoints)
    except (HpcaccelError, OSError):
        return []
    return [(f"{run}@{number}", path.name) for number, path in found if str(number).startswith(step)]


def _offered(incomplete: str, *, only_sweeps: bool) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    ids: dict[str, str] = {}
    for run_id, name, is_sweep in _runs():
        if only_sweeps and not is_sweep:
            continue
        if name.startswith(incomplete):
            found.setdefault(name, f"the latest is {run_id}")
        if run_id.startswith(incomplete) and len(ids) < MOST_IDS:
            ids.setdefault(run_id, name)
    return [*found.items(), *ids.items()]


def _runs() -> list[tuple[str, str, bool]]:
    """Id, name and whether it is a sweep of all runs here and of those that were submitted from here."""
    from hpcaccel.submission.find import known_runs
    from hpcaccel.submission.remote.remote_index import remote_runs

    here = [(run.run_id, run.name, run.kind == "sweep") for run in known_runs()]
    there = [(run["run_id"], run["name"], run.get("kind", "sweep") == "sweep") for run in remote_runs()]
    return sorted({*here, *there}, reverse=True)
