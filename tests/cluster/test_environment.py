"""Ranks from the environment of a real Slurm; tests/runtime/test_rank_env.py has made-up variables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.slurm import hostlist

from .dev_cluster import Cluster, wait_until
from .scenario import PROGRAMS

pytestmark = [pytest.mark.torch, pytest.mark.slow]

Lease = Callable[[int], list[str]]
PYTHON = f"/usr/bin/env OMP_NUM_THREADS=1 {sys.executable}"
TORCHRUN = f"{PYTHON} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-id 1"


class Cases:
    """Results of ``place.py``, by case."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def call(self, case: str, python: str = PYTHON) -> str:
        """The command line of a case."""
        return f"{python} {PROGRAMS / 'place.py'} {self.folder} {case}"

    def found(self, case: str) -> list[dict[str, Any]]:
        """Results of a case, by rank."""
        files = sorted(self.folder.glob(f"{case}.*.json"), key=lambda path: int(path.name.split(".")[1]))
        return [json.loads(path.read_text()) for path in files]

    def places(self, case: str) -> list[list[int]]:
        found = self.found(case)
        assert all(rank["sum"] == sum(10.0**number for number in range(len(found))) for rank in found), found
        return [rank["place"] for rank in found]


@pytest.fixture
def cases(tmp_path: Path) -> Cases:
    return Cases(tmp_path)


def submit(
    cluster: Cluster, folder: Path, nodes: list[str], *lines: str, options: tuple[str, ...] = (), tasks: int = 1
) -> str:
    """Run a batch script, whose steps may fail, and wait for its end; return its output."""
    script = folder / "script.sh"
    script.write_text("\n".join(["#!/bin/bash", *lines, f"touch {folder}/done-$SLURM_ARRAY_TASK_ID", ""]))
    cluster.sbatch(
        f"--nodes={len(nodes)}", f"--nodelist={hostlist.compress(nodes)}", f"--output={folder}/out-%a.log",
        *options, str(script),
    )  # fmt: skip
    wait_until(lambda: len(list(folder.glob("done-*"))) == tasks, "the end of the script", timeout_seconds=240)
    return "\n".join(path.read_text() for path in sorted(folder.glob("out-*.log")))


@pytest.mark.chaos
def test_ranks_are_found_in_srun_and_torchrun_steps_of_a_batch_job(
    cluster: Cluster, lease: Lease, cases: Cases
) -> None:
    nodes = lease(2)
    endpoint = f"--rdzv-endpoint {nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"
    said = submit(
        cluster,
        cases.folder,
        nodes,
        cases.call("batch"),
        f"srun --ntasks=4 --ntasks-per-node=2 env PATH=/nowhere {cases.call('square')}",
        f"srun --ntasks=3 {cases.call('uneven')}",
        f"srun --ntasks=2 --ntasks-per-node=1 {cases.call('whole')}",
        f"srun --ntasks=2 --ntasks-per-node=1 {cases.call('torchrun', f'{TORCHRUN} {endpoint}')}",
        options=("--job-name=bash", "--ntasks-per-node=2", "--gpus-per-node=2", "--mem=6G"),
    )
    assert [rank["place"] for rank in cases.found("batch")] == [[0, 1, 0, 1]], said
    assert cases.found("batch")[0]["source"] == "single"

    assert cases.places("square") == [[0, 4, 0, 2], [1, 4, 1, 2], [2, 4, 0, 2], [3, 4, 1, 2]], said
    square = cases.found("square")
    assert [rank["host"] for rank in square] == [nodes[0], nodes[0], nodes[1], nodes[1]]
    assert {(rank["source"], rank["address"], rank["scontrol"]) for rank in square} == {("slurm", nodes[0], False)}

    assert cases.places("uneven") == [[0, 3, 0, 2], [1, 3, 1, 2], [2, 3, 0, 1]], said

    whole = cases.found("whole")
    assert len(whole) == 2, said
    for rank in whole:
        assert "this Slurm task sees 2 GPUs but would use only one of them" in rank["error"]
        assert "launcher: torchrun" in rank["error"]

    torchrun = cases.places("torchrun")  # which node is the first is torchrun's choice
    assert [place[:2] for place in torchrun] == [[0, 4], [1, 4], [2, 4], [3, 4]], said
    assert [place[2:] for place in torchrun] == [[0, 2], [1, 2], [0, 2], [1, 2]]
    assert {rank["source"] for rank in cases.found("torchrun")} == {"torchrun"}


@pytest.mark.chaos
def test_concurrent_array_tasks_on_one_node_find_their_own_ranks(cluster: Cluster, lease: Lease, cases: Cases) -> None:
    said = submit(
        cluster,
        cases.folder,
        lease(1),
        f"srun --gpus-per-task=1 {cases.call('array$SLURM_ARRAY_TASK_ID')}",
        options=("--array=0-1", "--ntasks=2", "--gpus-per-task=1", "--mem=3G"),
        tasks=2,
    )
    for case in ("array0", "array1"):
        assert cases.places(case) == [[0, 2, 0, 2], [1, 2, 1, 2]], said
        assert [rank["gpus"] for rank in cases.found(case)] == [1, 1]


@pytest.mark.chaos
def test_ranks_are_found_in_the_shell_and_the_steps_of_salloc(cluster: Cluster, lease: Lease, cases: Cases) -> None:
    shell = f"{cases.call('shell')}; srun {cases.call('step')}; srun --ntasks=1 {cases.call('one')}"
    options = ["--nodes=1", "--ntasks=2", f"--nodelist={lease(1)[0]}", "--mem=3G", "--quiet"]
    said = cluster.run("salloc", *options, "bash", "-c", shell).stderr
    assert cases.places("shell") == [[0, 1, 0, 1]], said
    assert cases.places("step") == [[0, 2, 0, 2], [1, 2, 1, 2]], said
    assert cases.places("one") == [[0, 1, 0, 1]], said
    assert [cases.found(case)[0]["source"] for case in ("shell", "step", "one")] == ["single", "slurm", "slurm"]
