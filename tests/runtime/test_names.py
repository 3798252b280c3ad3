"""The table of names: the behaviour of each public name at 1 rank, and at 2 and 4 ranks started by torchrun.

One start serves all rows. The checks are in ``programs/table``; ``tests/cluster/test_names.py`` starts them by srun.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.made_once import made_once

from .ranks import PROGRAMS, ROOT, free_port, run_ranks
from .table_of_names import ROWS, Results

pytestmark = pytest.mark.torch

TIMEOUT_SECONDS = 280


@pytest.fixture(
    scope="module", params=[1, 2, pytest.param(4, marks=pytest.mark.chaos)], ids=["1 rank", "2 ranks", "4 ranks"]
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    size = request.param
    begin = alone if size == 1 else torchrun
    out, said = made_once(tmp_path_factory, f"names-torchrun-{size}", lambda out: begin(size, out))
    return Results(out, size, said)


def alone(size: int, out: Path) -> str:
    return "\n".join(run_ranks("names.py", [str(out)], size=size).outputs)


def torchrun(size: int, out: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port())]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "HPCACCEL_"))}
    done = subprocess.run(
        [*command, "--nproc-per-node", str(size), str(PROGRAMS / "names.py"), str(out)],
        env={**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ROWS)
def test_table_row_holds_on_every_rank(results: Results, name: str) -> None:
    results.check(name)


def test_program_ends_without_a_traceback(results: Results) -> None:
    assert "Traceback" not in results.said, results.said
    assert "terminated" not in results.said, results.said


def test_table_rows_are_found_and_unique(tmp_path: Path) -> None:
    assert len(ROWS) > 30
    assert len(set(ROWS)) == len(ROWS)
