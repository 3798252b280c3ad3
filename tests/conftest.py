"""Tests marked `cluster` need a real Slurm. Where none can be had they are skipped, and nobody can miss it.

The clusters that a session starts lie under roots that begin with one name, which workers of pytest-xdist inherit.
The process that began the session takes down whatever is left of them, when all workers are done.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from hpcaccel.core.progress_notes import SHOW_NOTE

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a script; what the tests start must hear Ctrl-C all the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)

DOCKER = Path(__file__).resolve().parent.parent / "docker"
ROOTS = "HPCACCEL_TEST_ROOTS"
SKIPPED = "no Slurm for the cluster tests: "


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ[ROOTS] = f"/var/tmp/hpcaccel-test-{os.getpid()}"


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    _say_what_was_skipped(config)
    prefix = Path(os.environ.pop(ROOTS))
    for root in prefix.parent.glob(f"{prefix.name}-*"):
        subprocess.run([DOCKER / "cluster", "down", "--root", root], check=True, capture_output=True)
        shutil.rmtree(root)


def why_no_cluster() -> str | None:
    """The reason, or None where a cluster runs or can be started."""
    if os.environ.get("HPCACCEL_TEST_CLUSTER"):
        return None
    check = subprocess.run([sys.executable, DOCKER / "cluster", "check"], capture_output=True, text=True, check=False)
    return check.stdout.strip() if check.returncode else None


@pytest.fixture(autouse=True)
def _notes_are_warnings() -> Iterator[None]:
    """A command that ran in this process has set where notes are shown."""
    token = SHOW_NOTE.set(None)
    yield
    SHOW_NOTE.reset(token)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    _mark_cluster(items)
    yield  # some are deselected now
    _begin_with_cluster(items)


def _mark_cluster(items: list[pytest.Item]) -> None:
    here = Path(__file__).resolve().parent / "cluster"
    wanted = []
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker("cluster")
        if item.get_closest_marker("cluster"):
            wanted.append(item)
    if wanted and (reason := why_no_cluster()) is not None:
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason=SKIPPED + reason))


def _begin_with_cluster(items: list[pytest.Item]) -> None:
    """Tests that mostly wait for Slurm come first, shared out over the equal parts in which pytest-xdist hands tests to
    its workers: at the end they would be waited for one by one."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("cluster"):
            files.setdefault(item.path, []).append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for file in sorted(files.values(), key=_functions, reverse=True):
        min(parts, key=_functions).extend(file)
    others = iter([item for item in items if not item.get_closest_marker("cluster")])
    for part in parts:
        part.extend(islice(others, max(0, len(items) // workers - len(part))))
    items[:] = [*(item for part in parts for item in part), *others]


def _functions(items: list[pytest.Item]) -> int:
    """A table's rows are one."""
    return len({item.nodeid.partition("[")[0] for item in items})


def _skipped(config: pytest.Config) -> list[pytest.TestReport]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter is not None else []
    return [report for report in reports if SKIPPED in str(report.longrepr)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    in_worker = hasattr(session.config, "workerinput")
    if not in_worker and os.environ.get("CI") == "true" and _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _say_what_was_skipped(config: pytest.Config) -> None:
    """As the very last lines: pytest's own summary comes before."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not (reports := _skipped(config)):
        return
    reason = str(reports[0].longrepr).partition(SKIPPED)[2].rstrip("')")
    reporter.write_line("")
    reporter.write_sep("!", f"CLUSTER TESTS SKIPPED: {len(reports)}", red=True, bold=True)
    reporter.write_line(f"Nothing was tested against a real Slurm: {reason}", red=True)
    if os.environ.get("CI") == "true":
        reporter.write_line("With CI=true this is a failure.", red=True)
    reporter.write_sep("!", red=True, bold=True)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with given options; skips where that is not allowed."""
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mount-{len(places)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount program")
        if done.returncode != 0:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
