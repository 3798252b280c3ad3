"""Several trainings in a row in one script, with one Accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from .ranks import make_run, run_ranks

pytestmark = pytest.mark.torch


def alone() -> list[dict[str, float]]:
    """The training of ``stages.py`` in one process without an Accelerator."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    inputs, targets = torch.arange(32.0).reshape(8, 4) / 32, torch.arange(8.0)[:, None]
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    sums = []
    for stage in range(3):
        if stage == 1:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        model.zero_grad()
        sums.append({name: float(value.double().sum()) for name, value in model.state_dict().items()})
    return sums


@pytest.mark.parametrize(("strategy", "way"), [("ddp", "destroy"), ("fsdp", "end")])
def test_prepare_works_again_after_the_process_group_was_left(strategy: str, way: str, tmp_path: Path) -> None:
    """First frozen, then unfrozen with a new optimizer, then with the objects that the stage before prepared."""
    ended = run_ranks("stages.py", [strategy, way, str(tmp_path)], size=2)
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    for found, expected in zip(ended.result()["sums"], alone(), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("verb", ["epochs", "steps", "checkpoint", "none"])
def test_second_training_does_not_resume_from_the_firsts_checkpoints(verb: str, tmp_path: Path) -> None:
    """It would start from the first training's weights, and train for fewer steps or none."""
    run = make_run(tmp_path / "run", checkpoint={"every_steps": 5})
    ended = run_ranks("second_training.py", [verb], size=1, run=run)
    assert "stage 0 trained" in ended.outputs[0], ended.outputs[0]
    if verb == "none":
        assert "stage 1 trained" in ended.outputs[0], ended.outputs[0]
        return
    assert ended.codes == [1]
    assert "RuntimeMisuse: " in ended.outputs[0], ended.outputs[0]
    assert "this process has already completed a training with checkpoints in" in ended.outputs[0]
