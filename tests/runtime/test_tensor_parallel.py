"""Tensor parallelism: layers sharded over neighbouring ranks by the user's plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallel.tensor_parallel import find_plan
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.chaos), 4])
def test_tensor_parallel_model_matches_the_plain_one(size: int, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    ended = run_ranks("shared.py", [str(tmp_path / "weights")], size=size)
    assert ended.codes == [0] * size, "\n".join(ended.outputs)
    found = ended.result()
    assert abs(found["ddp"]) < 1e-10
    assert abs(found["fsdp"]) < 1e-10
    assert found["skipped"] == [[0] * size, [1] * size]


def test_tensor_parallel_plan_is_required_and_may_be_the_models() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeMisuse, match="lists the modules of Linear to shard"):
        find_plan(model, None)
    model._tp_plan = {"a": "colwise"}  # type: ignore[assignment]
    assert [type(style).__name__ for style in find_plan(model, None).values()] == ["ColwiseParallel"]
    assert [type(style).__name__ for style in find_plan(model, {"b": "rowwise"}).values()] == ["RowwiseParallel"]
