"""Sizes of the mesh that the launcher refuses before any rank starts."""

from __future__ import annotations

import pytest

from .planning import ALONE, GPUS, JOB, config, plan, refusal, torchrun

pytestmark = pytest.mark.usefixtures("script_and_srun")

SIZES = ("dp-replicate", "dp-shard", "cp", "sp", "tp")
CP_3 = "--parallelism-config-cp-size 3 t.py"


@pytest.mark.parametrize("name", SIZES)
def test_size_below_one_is_refused(name: str) -> None:
    flag = f"--parallelism-config-{name}-size"
    assert refusal(f"{flag} 0 t.py") == f"{flag} 0 must be at least 1"
    assert refusal(f"{flag}=-2 --cpu --num-processes 2 t.py") == f"{flag} -2 must be at least 1"


@pytest.mark.parametrize("name", SIZES)
def test_size_that_does_not_divide_the_number_of_ranks_is_refused(name: str) -> None:
    flag = f"--parallelism-config-{name}-size"
    message = refusal(f"--num-processes 2 {flag} 4 t.py")
    assert message.startswith(f"the number of ranks, 2, must be a multiple of {flag} 4. Change the size, or the number")
    assert torchrun(plan(f"--num-processes 4 {flag} 4 t.py"))[1] == "--nproc-per-node=4"
    assert torchrun(plan(f"--num-processes 8 {flag} 4 t.py"))[1] == "--nproc-per-node=8"


def test_product_of_sizes_counts_and_those_of_the_file_are_named_as_in_the_file() -> None:
    file = config(num_processes=4, parallelism_config={"parallelism_config_tp_size": "2"})
    line = "--parallelism-config-cp-size 4 t.py"
    assert refusal(line, ALONE, file).startswith(
        "the number of ranks, 4, must be a multiple of 8, the product of --parallelism-config-cp-size 4 and "
        "parallelism_config_tp_size: 2 (in the configuration file). Change the sizes, or"
    )
    assert plan(f"--num-processes 8 {line}", ALONE, file).environ["PARALLELISM_CONFIG_TP_SIZE"] == "2"


@pytest.mark.parametrize(
    ("line", "env", "ranks"),
    [
        (CP_3, GPUS, 4),
        (CP_3, JOB, 8),
        (f"--nnodes 2 --nproc-per-node 2 --machine-rank 0 --main-process-ip a {CP_3}", GPUS, 4),
        (f"--cpu {CP_3}", ALONE, 1),
        (CP_3, {"PET_NPROC_PER_NODE": "2", **ALONE}, 2),
        (CP_3, {"PMI_SIZE": "16", **ALONE}, 16),
    ],
)
def test_number_of_ranks_is_known(line: str, env: dict[str, str], ranks: int) -> None:
    assert f"the number of ranks, {ranks}, must be a multiple of --parallelism-config-cp-size 3" in refusal(line, env)


@pytest.mark.parametrize(
    ("line", "env"),
    [
        (CP_3, ALONE),  # a machine whose accelerators may not be counted
        (f"--nnodes 1:4 --rdzv-endpoint a:1 --nproc-per-node 2 {CP_3}", ALONE),
        (f"--nproc-per-node auto {CP_3}", ALONE),
        (f"--num-processes 2 --use-parallelism-config=false {CP_3}", ALONE),
        (CP_3, {"RANK": "0", "WORLD_SIZE": "2", "HPCACCEL_RUN_DIR": "/r"}),
    ],
)
def test_number_of_ranks_is_not_known_or_the_sizes_are_not_used(line: str, env: dict[str, str]) -> None:
    assert plan(line, env).command
