"""Losses and weights of an undisturbed run, the reference for all others."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

from .dev_cluster import Cluster
from .scenario import Scenario

STEPS = 40


def undisturbed(
    cluster: Cluster, *, strategy: str, nodes: list[str], make_folder: Callable[[str], Path]
) -> tuple[dict[int, float], str]:
    """Losses by step and the digest of the final weights. The first test to need them makes the run for all workers."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    path = cluster.root / f"undisturbed-{strategy}-{session}.json"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            run = Scenario(cluster, make_folder(strategy), nodes=nodes)
            run.train(runtime={"strategy": strategy})
            assert run.wait_until_over() == 0, run.story
            assert run.ends == [("completed", "end")]
            path.write_text(json.dumps([list(run.losses.items()), run.digest]))
    losses, digest = json.loads(path.read_text())
    assert len(losses) == STEPS
    return dict(losses), digest
