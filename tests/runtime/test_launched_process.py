"""Functions as the main programs of ranks, their place among the ranks, and variables that tests leave behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import unittest
from pathlib import Path

import pytest

from hpcaccel.errors import RankEnvironmentError, RuntimeMisuse
from hpcaccel.launchers import test_launch as create_group
from hpcaccel.utils import (
    TORCH_LAUNCH_PARAMS,
    PrepareForLaunch,
    get_cpu_distributed_information,
    patch_environment,
    purge_accelerate_environment,
)
from tests.runtime.ranks import ROOT, free_port

pytestmark = pytest.mark.torch

STARTED = """
import os, sys
from torch.multiprocessing import start_processes
from hpcaccel.utils import PrepareForLaunch

def train(folder):
    from hpcaccel import Accelerator
    accelerator = Accelerator(cpu=True)
    total = accelerator.gather_for_metrics([accelerator.process_index])
    place = [accelerator.num_processes, accelerator.local_process_index, os.environ["FORK_LAUNCHED"], total]
    with open(f"{folder}/{accelerator.process_index}", "w") as file:
        file.write(repr(place))

if __name__ == "__main__":
    kind, debug, method = sys.argv[2:]
    start_processes(PrepareForLaunch(train, kind, debug == "debug"), args=(sys.argv[1],), nprocs=2, start_method=method)
"""


def start(folder: Path, *words: str, **env: str) -> None:
    program = folder / "started.py"
    program.write_text(STARTED)
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCACCEL_"))}
    done = subprocess.run(
        [sys.executable, str(program), str(folder), *words],
        env={**outside, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert (folder / str(rank)).read_text() == f"[2, {rank}, '1', [0, 1]]"


def test_function_becomes_the_program_of_each_rank(tmp_path: Path) -> None:
    meeting = {"WORLD_SIZE": "2", "NPROC": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    start(tmp_path, "MULTI_CPU", "", "fork", **meeting)


@pytest.mark.chaos
def test_debugged_function_joins_a_group_by_a_file(tmp_path: Path) -> None:
    start(tmp_path, "NO", "debug", "fork", WORLD_SIZE="2", ACCELERATE_DEBUG_RDV_FILE=str(tmp_path / "meeting"))


@pytest.mark.chaos
def test_function_becomes_the_program_of_each_spawned_rank(tmp_path: Path) -> None:
    meeting = {"WORLD_SIZE": "2", "NPROC": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    start(tmp_path, "MULTI_CPU", "", "spawn", **meeting)


def test_ranks_of_a_second_node_are_numbered_after_those_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FORK_LAUNCHED"):
        monkeypatch.setenv(name, "")  # removed at the end
    found: list[str] = []
    with patch_environment(nproc=4, node_rank=1):
        PrepareForLaunch(lambda word: found.extend([word, os.environ["RANK"], os.environ["LOCAL_RANK"]]), "MULTI_GPU")(
            2, "word"
        )
    assert found == ["word", "6", "2"]


def test_debugged_function_without_its_variables_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeMisuse, match="WORLD_SIZE=None"):
        PrepareForLaunch(print, debug=True)(0)
    with pytest.raises(ValueError, match="MULTI_TPU"):
        PrepareForLaunch(print, "MULTI_TPU")


def test_names_are_those_of_torchruns_options() -> None:
    from torch.distributed.run import get_args_parser

    options = {word.lstrip("-").replace("-", "_") for one in get_args_parser()._actions for word in one.option_strings}
    assert set(TORCH_LAUNCH_PARAMS) <= options
    assert len(set(TORCH_LAUNCH_PARAMS)) == len(TORCH_LAUNCH_PARAMS)


PLACE = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n",
    "MASTER_PORT": "1",
}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2"}  # fmt: skip
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip


@pytest.mark.parametrize(
    ("env", "expected"),
    [({}, (0, 1, 0, 1)), (PLACE, (5, 8, 1, 4)), (SRUN, (3, 4, 1, 2)), (MPIRUN, (1, 2, 1, 2))],
    ids=["alone", "torchrun", "srun", "mpirun"],
)
def test_place_among_the_ranks(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: tuple[int, ...]) -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCACCEL_"))}
    monkeypatch.setattr(os, "environ", {**outside, **env})
    found = get_cpu_distributed_information()
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == expected


def test_contradictory_variables_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**PLACE, "RANK": "8"})
    with pytest.raises(RankEnvironmentError, match="RANK=8"):
        get_cpu_distributed_information()


def test_first_step_of_a_program_creates_the_group() -> None:
    from hpcaccel.state import PartialState

    create_group()
    assert PartialState().initialized
    PartialState().destroy_process_group()


# -- variables that are left behind ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_NEW", "ACCELERATE_OLD", "ACCELERATE_GONE", "OTHER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_OLD", "before")
    monkeypatch.setenv("ACCELERATE_GONE", "here")


def meddle() -> None:
    assert "ACCELERATE_NEW" not in os.environ
    os.environ.update(ACCELERATE_NEW="1", ACCELERATE_OLD="after", OTHER="stays")
    os.environ.pop("ACCELERATE_GONE", None)


def assert_restored() -> None:
    found = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    assert "ACCELERATE_NEW" not in found
    assert (found["ACCELERATE_OLD"], found["ACCELERATE_GONE"]) == ("before", "here")
    assert os.environ.pop("OTHER") == "stays"


def test_variables_are_restored_after_a_function() -> None:
    @purge_accelerate_environment
    def work(number: int, *, fails: bool = False) -> int:
        """Does it."""
        meddle()
        if fails:
            raise RuntimeError
        return number + 1

    assert (work(1), work.__name__, work.__doc__) == (2, "work", "Does it.")
    assert_restored()
    with pytest.raises(RuntimeError):
        work(1, fails=True)
    assert_restored()


def test_variables_are_restored_after_a_coroutine() -> None:
    @purge_accelerate_environment
    async def work() -> str:
        await asyncio.sleep(0)
        meddle()
        return os.environ["ACCELERATE_NEW"]

    assert asyncio.run(work()) == "1"
    assert_restored()


def test_variables_are_restored_after_each_test_of_a_class_and_its_subclasses() -> None:
    made: list[str] = []

    class Base:
        def __init_subclass__(cls, *, word: str = "", **options: object) -> None:
            super().__init_subclass__(**options)
            made.append(f"{cls.__name__} {word}")

        def helper(self) -> None:
            meddle()

        def test_inherited(self) -> None:
            meddle()

    @purge_accelerate_environment
    class Tests(Base):
        test_number = 3

        def test_own(self) -> None:
            meddle()

    class More(Tests, word="x"):
        def test_more(self) -> None:
            meddle()

    assert made == ["Tests ", "More x"]
    for call in (Tests().test_inherited, Tests().test_own, More().test_own, More().test_more):
        call()
        assert_restored()
    Base().test_inherited()
    assert os.environ["ACCELERATE_NEW"] == "1"  # the class itself is not decorated


def test_variables_are_restored_in_unittest() -> None:
    @purge_accelerate_environment
    class Case(unittest.TestCase):
        def test_it(self) -> None:
            meddle()

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
    assert result.wasSuccessful()
    assert_restored()
