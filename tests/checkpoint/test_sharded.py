"""Sharded state, also in registered objects, and state that cannot be reassembled."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpcaccel.checkpoint import CheckpointEngine, TrainingState
from hpcaccel.errors import CheckpointError
from tests.checkpoint.training import Training
from tests.checkpoint.world import run_ranks


class Average:
    """Moving average of the weights, sharded like them; loaded in place."""

    def __init__(self, model):
        self.shadow = {name: copy.deepcopy(value.detach()) for name, value in model.named_parameters()}

    def state_dict(self):
        return {"shadow": self.shadow, "decay": 0.9}

    def load_state_dict(self, state):
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)


def _move_average(rank, directory):
    first, second = Training("fsdp", rank=rank), Training("fsdp", seed=2, rank=rank)
    first.steps(2)
    average, again = Average(first.model), Average(second.model)
    engine = CheckpointEngine(directory, rank=rank, world_size=2)
    engine.save(TrainingState([first.model], objects={"ema": average}), step=1)
    engine.load(engine.find(), TrainingState([second.model], objects={"ema": again}))
    return all(torch.equal(average.shadow[name].to_local(), again.shadow[name].to_local()) for name in again.shadow)


def test_registered_object_with_sharded_tensors_is_restored(tmp_path):
    assert run_ranks(_move_average, tmp_path) == [True, True]
    model = Training("plain").model
    whole = Average(model)
    loaded = CheckpointEngine(tmp_path).load(tmp_path / "step_00000001", TrainingState([model], objects={"ema": whole}))
    assert loaded.step == 1
    assert all(torch.equal(value, dict(model.named_parameters())[name]) for name, value in whole.shadow.items())


def _refused(rank, directory):
    engine = CheckpointEngine(directory, rank=rank, world_size=2)
    messages = []

    def save(state):
        with pytest.raises(CheckpointError) as caught:
            engine.save(state, step=1)
        messages.append(str(caught.value))

    training = Training("fsdp", rank=rank)
    training.steps(1)
    weight = training.model.embed.weight
    training.optimizer.state[weight]["row"] = torch.ones(3)
    save(training.state())
    save(TrainingState([nn.Linear(2, 2) if rank == 0 else nn.Linear(3, 2)]))
    save(TrainingState([nn.Sequential(nn.Linear(2, 2)) if rank == 0 else nn.Sequential(nn.ReLU(), nn.Linear(2, 2))]))
    save(TrainingState(objects={"x": Partial()}))
    return messages, [path.name for path in directory.iterdir()] if directory.exists() else []


class Partial:
    def state_dict(self):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        return dist.tensor.DTensor.from_local(torch.ones(2), mesh, [dist.tensor.Partial()])

    def load_state_dict(self, state):
        raise AssertionError


def test_state_that_ranks_cannot_reassemble_is_refused(tmp_path):
    (messages, left), (others, _) = run_ranks(_refused, tmp_path / "checkpoints")
    assert messages == others
    local, shape, names, partial = messages
    assert "['row'] is a plain tensor of shape (3,) in the state of a sharded parameter" in local
    assert "have different parameters, for example 0.weight (2, 2) torch.float32:" in shape
    assert "have different parameters, for example 0.0.bias (2,) torch.float32:" in names
    assert "objects.x is a partial DTensor" in partial
    assert left == []
