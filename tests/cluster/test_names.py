"""The table of names under a real srun: no variables of launchers except Slurm's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.made_once import made_once
from tests.runtime.table_of_names import PROGRAMS, ROWS, Results

from .dev_cluster import Cluster

TIMEOUT_SECONDS = 280


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.chaos), pytest.param(2, marks=pytest.mark.chaos), 4],
    ids=["1 rank", "2 ranks", "4 ranks"],
)
def results(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    lease_for_module: Callable[[int], list[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Results:
    """Four ranks on two nodes, fewer on one."""
    size = request.param

    def srun(out: Path) -> str:
        nodes = lease_for_module(2 if size == 4 else 1)
        done = subprocess.run(
            [
                "srun", "--partition=gpu", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}",
                f"--ntasks={size}", f"--ntasks-per-node={size // len(nodes)}", "--overcommit", "--mem=4G", "--time=10",
                sys.executable, str(PROGRAMS / "names.py"), str(out),
            ],
            env={**cluster.env, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    out, said = made_once(tmp_path_factory, f"names-srun-{size}", srun)
    return Results(out, size, said)


@pytest.mark.chaos
@pytest.mark.parametrize("name", ROWS)
def test_row_of_the_table_of_names_passes_under_srun(results: Results, name: str) -> None:
    results.check(name)
