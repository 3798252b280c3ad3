"""The environment that the ranks are started in."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from .conftest import LocalRun

Make = Callable[..., LocalRun]

SAYS = "import json, os; print(json.dumps(dict(os.environ)))"


def environment(run: LocalRun) -> dict[str, str]:
    assert run.run() == 0, run.log
    value: dict[str, str] = json.loads(run.dir.rank_log(1, 0).read_text())
    return value


def test_each_attempt_has_a_place_for_torchs_flight_recorder(local_run: Make) -> None:
    run = local_run(SAYS)
    assert environment(run)["TORCH_FR_DUMP_TEMP_FILE"] == f"{run.dir.attempt(1)}/flight_recorder_"


def test_the_users_own_place_for_it_counts(local_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/elsewhere/trace_")
    assert environment(local_run(SAYS))["TORCH_FR_DUMP_TEMP_FILE"] == "/elsewhere/trace_"


@pytest.mark.parametrize(("share", "left"), [(True, {"SLURM_TRES_PER_TASK": "cpu=4"}), (False, None)])
def test_ranks_that_share_the_gpus_of_their_node(
    local_run: Make, monkeypatch: pytest.MonkeyPatch, share: bool, left: dict[str, str] | None
) -> None:
    given = {
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_TRES_BIND": "gres/gpu:per_task:1",
        "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = environment(local_run(SAYS, launch={"share_gpus": share}))
    assert {name: seen[name] for name in given if name in seen} == (given if left is None else left)
