"""Shared test setup. Tests marked `cluster` need a real Slurm: without one they are skipped with a loud notice.

The roots of the clusters that a session starts have a common prefix, which workers of pytest-xdist inherit. The main
process takes down the remaining clusters when all workers are done.
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
    # A script that starts pytest in the background makes it ignore SIGINT, but the tests' programs must receive it.
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
    """Reason why there is no cluster; None if one runs or can be started."""
    if os.environ.get("HPCACCEL_TEST_CLUSTER"):
        return None
    check = subprocess.run([sys.executable, DOCKER / "cluster", "check"], capture_output=True, text=True, check=False)
    return check.stdout.strip() if check.returncode else None


@pytest.fixture(autouse=True)
def _notes_are_warnings() -> Iterator[None]:
    """Reset where notes are shown, which a command that ran in this process has set."""
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
    """Order cluster tests first, spread over the equal parts of tests that pytest-xdist gives its workers. They mostly
    wait for Slurm: at the end of the session, they would run one by one."""
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
    """Number of test functions; the rows of a parametrized test count as one."""
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
    """Print the skipped cluster tests as the very last lines, after pytest's own summary."""
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
    """Mount a tmpfs with given options; skip the test where that is not allowed."""
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
