"""PartialState, AcceleratorState and GradientState, before, with and after an Accelerator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.enums import DistributedType
from hpcaccel.runtime.states.accelerator_state import AcceleratorState
from hpcaccel.runtime.states.gradient_state import GradientState
from hpcaccel.runtime.states.partial_state import PartialState

from .ranks import PROGRAMS, ROOT, run_ranks

pytestmark = pytest.mark.torch


def torchrun(program: str, *, size: int) -> dict[str, Any]:
    """The JSON that rank 0 prints under the real torchrun."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCACCEL_"))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    answer = subprocess.run(
        [*command, str(PROGRAMS / program)],
        env={**outside, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    lines = [line for line in answer.stdout.splitlines() if line.startswith("{")]
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.fixture(scope="module", params=[1, 2])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == 1:
        return run_ranks("states.py", size=1, launcher="alone").result()
    return torchrun("states.py", size=request.param)


def ranks(found: dict[str, Any]) -> int:
    return len(found["before"])


def test_states_report_rank_device_and_backend(found: dict[str, Any]) -> None:
    if ranks(found) == 1:
        assert found["before"] == [[0, 1, 0, True, True, True, False, "cpu", "NO"]]
    else:
        assert found["before"] == [
            [0, 2, 0, True, True, False, True, "cpu", "MULTI_CPU"],
            [1, 2, 1, False, False, True, True, "cpu", "MULTI_CPU"],
        ]
    assert found["backend"] == ([None] if ranks(found) == 1 else ["gloo", "gloo"])
    assert all(found["after"])


def test_print_writes_once_per_node(found: dict[str, Any]) -> None:
    assert found["printed"] == ["word\n", ""][: ranks(found)]


def test_decorated_functions_run_on_their_processes_only(found: dict[str, Any]) -> None:
    if ranks(found) == 1:  # a single process runs all of them
        assert found["calls"] == [["main", "early", "second", "local second", "last", "local main"]]
    else:
        assert found["calls"] == [["main", "early", "local main"], ["second", "local second", "last"]]
    assert found["returned"] == ["main", None][: ranks(found)]


def test_main_process_first_runs_the_main_process_first(found: dict[str, Any]) -> None:
    assert found["order"] == ([0] if ranks(found) == 1 else [1, 2])


def test_gather_for_metrics_restores_a_split_without_its_padding(found: dict[str, Any]) -> None:
    upper = ["A", "BB", "CCC", "DDDD", "EEEEE"]
    padding = ranks(found) - 1
    for gathered, metrics, nested in zip(found["gathered"], found["metrics"], found["nested"], strict=True):
        assert gathered == [[1, 2, 3, 4, 5] + [5] * padding, upper + ["EEEEE"] * padding]
        assert metrics == [[1, 2, 3, 4, 5], upper]
        assert nested == [upper, [1, 2, 3, 4, 5], ranks(found), "r" if ranks(found) == 1 else ["r", "r"]]
    assert found["few"][-1] == [["a"] if ranks(found) == 1 else [], ["a"], ["a"]]


def test_gradient_state_follows_the_training_loop(found: dict[str, Any]) -> None:
    for seen, inside in found["gradients"]:
        assert [boundary for boundary, _, _ in seen] == (
            [False, True] * 3 if ranks(found) == 1 else [False, True, True]
        )
        assert [end for _, _, end in seen] == [False] * (len(seen) - 1) + [True]
        assert all(in_loader for _, in_loader, _ in seen)
        assert inside is False


def test_states_keep_their_values_after_end_training(found: dict[str, Any]) -> None:
    assert found["ended"] == [["word\n", "word\n", True, False]]  # of rank 0 only: there is no group to gather with
    assert found["ended_of"] == [0, ranks(found)]
    assert ("waited" in found) == (ranks(found) > 1)
    assert "Create a new Accelerator()" in found.get("waited", "Create a new Accelerator()")


def test_process_group_made_by_the_script_is_used_and_kept(found: dict[str, Any]) -> None:
    if ranks(found) > 1:
        assert found["group kept"] == [True, True]
        assert found["own group"] == [[2, 0], [2, 1]]
        assert found["own group stays"] is found["own group destroyed"] is True
        assert found["destroyed behind its back"] == [[2, [0, 1]]] * 2


@pytest.mark.chaos
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_accelerator_can_be_created_and_ended_five_times(launcher: str) -> None:
    if launcher == "torchrun":
        result = torchrun("again.py", size=2)
    else:
        ended = run_ranks("again.py", launcher="srun")
        assert ended.codes == [0, 0], ended.outputs
        result = ended.result()
    assert result["types"] == ["MULTI_CPU", "FSDP", "MULTI_CPU", "FSDP", "MULTI_CPU"]
    assert len(set(result["sums"])) == 1


# -- in this process -----------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerator_state_before_an_accelerator_is_refused(fresh: None) -> None:
    with pytest.raises(RuntimeMisuse, match="create an Accelerator first"):
        AcceleratorState()
    PartialState()
    with pytest.raises(RuntimeMisuse, match="create an Accelerator first"):
        AcceleratorState()


def test_reset_state_raises_on_access(fresh: None) -> None:
    state = PartialState()
    PartialState._reset_state()
    assert not state.initialized
    with pytest.raises(AttributeError, match="has been reset"):
        state.process_index  # noqa: B018


def test_accelerator_state_refuses_another_precision(fresh: None) -> None:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    assert AcceleratorState("bf16").mixed_precision == accelerator.mixed_precision == "bf16"
    with pytest.raises(RuntimeMisuse, match=r"mixed_precision='no'.*already"):
        AcceleratorState(mixed_precision="no")
    assert AcceleratorState._shared_state["mixed_precision"] == "bf16"


def test_partial_state_refuses_unknown_keywords(fresh: None) -> None:
    with pytest.raises(RuntimeMisuse, match=r"PartialState\(ranks=3\).*cpu, backend, init_method, timeout"):
        PartialState(ranks=3)


def test_gradient_state_without_an_accelerator_has_defaults(fresh: None) -> None:
    GradientState._reset_state()
    state = GradientState()
    assert (state.sync_gradients, state.num_steps, state.in_dataloader, state.remainder) == (True, 1, False, -1)
    assert (state.end_of_dataloader, state.dataloader_references, state.initialized) == (False, [None], False)


def test_gradient_state_is_shared_with_the_accelerator(fresh: None) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    state = GradientState()
    assert state.num_steps == 4
    accelerator.gradient_accumulation_steps = 2
    assert state.num_steps == 2
    state._set_sync_gradients(False)
    assert accelerator.sync_gradients is False
    assert "Sync Gradients: False" in repr(state)


@pytest.mark.parametrize("value", [(n for n in range(4)), "text", torch.utils.data.DataLoader([1, 2])])
def test_unsupported_type_cannot_be_split_on_one_rank_either(fresh: None, value: Any) -> None:
    with pytest.raises(RuntimeMisuse, match="cannot split"), PartialState(cpu=True).split_between_processes(value):
        pass


def test_debug_flag_is_shared_by_all_states(fresh: None) -> None:
    state = PartialState(cpu=True)
    assert not state.debug
    state.debug = True
    assert PartialState().debug
    assert Accelerator(cpu=True).state.debug


def test_distributed_type_can_be_assigned(fresh: None) -> None:
    accelerator = Accelerator(cpu=True)
    before = accelerator.state.distributed_type
    accelerator.state.distributed_type = DistributedType.FSDP
    assert accelerator.distributed_type is AcceleratorState().distributed_type is DistributedType.FSDP
    assert not accelerator.is_fsdp2
    with pytest.warns(UserWarning, match="only supported for multi-GPU"), accelerator.join_uneven_inputs([object()]):
        pass
    accelerator.state.distributed_type = before
    assert accelerator.distributed_type is before


def test_repr_shows_processes_and_precision(fresh: None) -> None:
    assert "Num processes: 1" in repr(PartialState())
    assert "Mixed precision type: no" in repr(Accelerator(cpu=True).state)


def test_hpcaccel_alone_gives_a_world_of_one(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("HPCACCEL_ALONE", "1")
    assert PartialState().num_processes == 1
