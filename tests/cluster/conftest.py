"""One real cluster for all tests of a session.

`HPCACCEL_TEST_CLUSTER=<root>` names one that is already running (`docker/cluster up --root <root>`) and is left
running. Otherwise the first test that needs the cluster starts it, in any worker of pytest-xdist, and the end of the
session takes it down (tests/conftest.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.remote.login_node import LoginNode, why_no_sshd

from .dev_cluster import Cluster, Lease, program, temporary_root
from .scenario import Scenario
from .undisturbed import undisturbed

NODES = 8


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """A running cluster, shared with all other tests: use only leased nodes."""
    if given := os.environ.get("HPCACCEL_TEST_CLUSTER"):
        return Cluster.at(Path(given))
    root = Path(os.environ["HPCACCEL_TEST_ROOTS"] + "-shared")
    program("up", "--root", str(root), "--nodes", str(NODES))  # starts it, unless another worker has
    return Cluster.at(root)


@pytest.fixture
def lease(cluster: Cluster) -> Iterator[Callable[[int], list[str]]]:
    """`lease(2)`: two nodes that no other test uses until this one ends; jobs left on them are then cancelled.

    Lease once per test, and submit with --nodelist: an `urgent` job elsewhere would preempt the job of another test.
    """
    held: list[Lease] = []

    def take(count: int) -> list[str]:
        held.append(Lease.take(cluster, count))
        return held[-1].nodes

    yield take
    for lease in held:
        lease.release()


@pytest.fixture(scope="module")
def lease_for_module(cluster: Cluster) -> Iterator[Callable[[int], list[str]]]:
    """Like ``lease``, for fixtures of a whole file: each call releases the nodes of the previous one."""
    held: list[Lease] = []

    def take(count: int) -> list[str]:
        while held:
            held.pop().release()
        held.append(Lease.take(cluster, count))
        return held[-1].nodes

    yield take
    while held:
        held.pop().release()


@pytest.fixture
def new_root() -> Iterator[Path]:
    """A root for the test's own cluster, which is taken down at the end."""
    with temporary_root() as root:
        yield root


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path) -> Iterator[LoginNode]:
    """A login node of the cluster; its client has a profile and the facts."""
    if (reason := why_no_sshd()) is not None:
        pytest.skip(f"no login node: {reason}")
    env = {"SLURM_CONF": cluster.env["SLURM_CONF"], "HPCACCEL_QUEUE_SECONDS": "0"}
    node = LoginNode(tmp_path / "login", path=cluster.login_path, env=env)
    node.start()
    try:
        node.hpcaccel("cluster", "probe", "alps")
        yield node
    finally:
        node.stop()


@pytest.fixture
def assert_exact(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Compare a run that has ended with an undisturbed one on the same nodes."""

    def check(run: Scenario, *, strategy: str = "ddp", nodes: list[str] | None = None) -> None:
        losses, digest = undisturbed(
            cluster, strategy=strategy, nodes=nodes or run.nodes, make_folder=tmp_path_factory.mktemp
        )
        assert run.losses == losses, run.story
        assert run.digest == digest, run.story

    return check
