"""Models, optimizers, schedulers, scalers and registered objects are restored as saved."""

import collections
import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from hpcaccel.checkpoint import CheckpointEngine, TrainingState, capture_rng, restore_rng
from hpcaccel.errors import CheckpointError


class Holder:
    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def move(directory, source: TrainingState, target: TrainingState):
    engine = CheckpointEngine(directory)
    return engine.load(engine.save(source, step=1), target)


def stepped(model, optimizer, count=2):
    for _ in range(count):
        optimizer.zero_grad()
        sum(parameter.float().square().sum() for parameter in model.parameters() if parameter.requires_grad).backward()
        optimizer.step()


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_loading_a_fresh_optimizer_clears_the_state_of_a_used_one(tmp_path):
    model, used = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(used.parameters())
    stepped(used, other)
    before = copy.deepcopy(model.state_dict())
    move(tmp_path, TrainingState([model], [optimizer]), TrainingState([used], [other]))
    assert not optimizer.state  # saving did not initialize it
    assert not other.state
    assert equal(used.state_dict(), before)


def test_float32_moments_of_bfloat16_parameters_keep_their_bits(tmp_path):
    def build():
        model = nn.Linear(3, 3).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.randn(parameter.shape)
        return model, optimizer

    (model, optimizer), (again, other) = build(), build()
    move(tmp_path, TrainingState([model], [optimizer]), TrainingState([again], [other]))
    assert equal(other.state_dict(), optimizer.state_dict())
    assert other.state[again.weight]["momentum_buffer"].dtype is torch.float32


def test_group_hyperparameters_load_whatever_the_order_of_parameters(tmp_path):
    def build(turned):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        first = [model["a"].weight, model["b"].weight]
        groups = [
            {"params": first[::-1] if turned else first, "lr": 0.5 if not turned else 0.1},
            {"params": [model["a"].bias, model["b"].bias], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        ]
        optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.01), foreach=False)
        return model, optimizer

    (model, optimizer), (again, other) = build(False), build(True)
    stepped(model, optimizer)
    optimizer.param_groups[1]["lr"].fill_(0.25)
    held = other.param_groups[1]["lr"]
    move(tmp_path, TrainingState([model], [optimizer]), TrainingState([again], [other]))
    assert [float(group["lr"]) for group in other.param_groups] == [0.5, 0.25]
    assert other.param_groups[1]["lr"] is held
    assert other.param_groups[1]["betas"] == (0.8, 0.9)
    for name, parameter in again.named_parameters():
        assert equal(other.state[parameter], optimizer.state[dict(model.named_parameters())[name]])


def test_different_parameter_groups_are_an_error_naming_the_difference(tmp_path):
    model, again = nn.Linear(2, 2), nn.Linear(2, 2)
    saved = TrainingState([model], [torch.optim.SGD(model.parameters(), lr=1)])
    two = torch.optim.SGD([{"params": [again.weight]}, {"params": [again.bias]}], lr=1)
    with pytest.raises(CheckpointError, match=r"optimizers\.0: number of parameter groups: 1 in the checkpoint, 2 "):
        move(tmp_path / "a", saved, TrainingState([again], [two]))
    fewer = torch.optim.SGD([again.weight], lr=1)
    with pytest.raises(CheckpointError, match=r"group 0 has '0\.bias' only in the checkpoint"):
        move(tmp_path / "b", saved, TrainingState([again], [fewer]))


def test_models_with_their_own_and_a_shared_optimizer_are_restored(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        models = [nn.Linear(2, 3), nn.Linear(2, 3)]
        common = [parameter for model in models for parameter in model.parameters()]
        return models, [torch.optim.Adam(models[0].parameters()), torch.optim.SGD(common, lr=1e-3, momentum=0.9)]

    (models, optimizers), (again, others) = build(0), build(1)
    for model in models:
        for optimizer in optimizers:
            stepped(model, optimizer)
    move(tmp_path, TrainingState(models, optimizers), TrainingState(again, others))
    assert equal([model.state_dict() for model in models], [model.state_dict() for model in again])
    assert equal([item.state_dict() for item in optimizers], [item.state_dict() for item in others])


def test_parameter_outside_any_model_is_restored_with_its_state(tmp_path):
    def build(value):
        parameter = nn.Parameter(torch.tensor([value]))
        return parameter, torch.optim.Adam([parameter])

    (parameter, optimizer), (again, other) = build(1.0), build(2.0)
    parameter.square().sum().backward()
    optimizer.step()
    move(tmp_path, TrainingState([], [optimizer]), TrainingState([], [other]))
    assert again.item() == parameter.item()
    assert equal(other.state_dict(), optimizer.state_dict())


def test_lbfgs_state_with_lists_of_tensors_is_restored(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Linear(3, 1)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 3)) - 1).pow(2).sum() + model.weight.abs().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    (model, optimizer), (again, other) = build(0), build(1)
    step(model, optimizer)
    move(tmp_path, TrainingState([model], [optimizer]), TrainingState([again], [other]))
    step(model, optimizer)
    step(again, other)
    assert equal(again.state_dict(), model.state_dict())


SCHEDULERS = {
    "multi-step": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3]),
    "one-cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "cyclic": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, cycle_momentum=False),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_continues_after_a_load(tmp_path, name):
    def build():
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer, scheduler, count):
        found = []
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    (optimizer, scheduler), (other, again) = build(), build()
    rates(optimizer, scheduler, 3)
    move(tmp_path, TrainingState([], [optimizer], [scheduler]), TrainingState([], [other], [again]))
    assert rates(other, again, 5) == rates(optimizer, scheduler, 5)


def test_scaler_is_restored_and_a_missing_one_is_logged(tmp_path, caplog):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    again = torch.amp.GradScaler("cpu")
    move(tmp_path / "a", TrainingState(scaler=scaler), TrainingState(scaler=again))
    assert again.state_dict() == scaler.state_dict()
    move(tmp_path / "b", TrainingState(scaler=scaler), TrainingState())
    assert "the checkpoint contains a gradient scaler, but this training has none" in caplog.text


def test_registered_object_with_every_type_of_value_is_restored(tmp_path):
    value = {
        "order": torch.randperm(50),
        "array": np.arange(6).reshape(2, 3),
        1: (None, True, 2**100, float("inf"), b"\x00", "ü"),
        "window": collections.deque([0.1, 0.2], maxlen=5),
        "generator": np.random.default_rng(3).bit_generator.state,
        "none": None,
        "half": torch.ones(2, dtype=torch.bfloat16),
        "empty": torch.ones(0, 3),
        "turned": torch.arange(6).reshape(2, 3).T,
        "scalar": torch.tensor(1.5),
        "complex": torch.tensor([1 + 2j]).conj(),
    }
    target = Holder()
    move(tmp_path, TrainingState(objects={"x": Holder(value)}), TrainingState(objects={"x": target}))
    arrays = value.pop("array"), target.value.pop("array")
    assert np.array_equal(*arrays)
    assert equal(target.value, value)


def test_different_registered_objects_are_an_error(tmp_path):
    source = TrainingState(objects={"ema": Holder(1), "same": Holder(1)})
    target = TrainingState(objects={"new": Holder(1), "same": Holder(1)})
    with pytest.raises(
        CheckpointError, match=r"missing from the checkpoint: \['new'\]; only in the checkpoint: \['ema'\]"
    ):
        move(tmp_path, source, target)


class Extra(nn.Module):
    """A module with extra state, a buffer that is not saved, and a frozen parameter."""

    def __init__(self, note):
        super().__init__()
        self.note = note
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.register_buffer("count", torch.tensor(3))

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def test_extra_state_buffers_and_frozen_parameters_are_restored(tmp_path):
    source, target = Extra({"scale": torch.ones(3)}), Extra({"scale": torch.zeros(7), "old": 1})
    source.count.fill_(9)
    move(tmp_path, TrainingState([nn.Sequential(source)]), TrainingState([nn.Sequential(target)]))
    assert equal(target.note, {"scale": torch.ones(3)})
    assert target.count == 9
    assert equal(target.frozen.data, source.frozen.data)


class Tied(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tie:
            self.b.weight = self.a.weight


@pytest.mark.parametrize("tied_now", [True, False])
def test_tied_weights_are_stored_once_and_may_be_untied_later(tmp_path, tied_now):
    source, target = Tied(True), Tied(tied_now)
    move(tmp_path, TrainingState([source]), TrainingState([target]))
    assert torch.equal(target.a.weight, source.a.weight)
    assert torch.equal(target.b.weight, source.a.weight)
    assert (target.a.weight is target.b.weight) == tied_now
    assert (tmp_path / "step_00000001" / "index.json").read_text().count("models.0.") == 1


def test_different_parameter_dtype_is_an_error(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"weight is torch.float32 in the checkpoint, torch.bfloat16 in this model"
    ):
        move(tmp_path, TrainingState([nn.Linear(2, 2)]), TrainingState([nn.Linear(2, 2).bfloat16()]))


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()


def test_random_generators_continue_where_they_were_saved(tmp_path):
    random.gauss(0, 1)  # caches a second value
    np.random.randn()
    loaded = None
    engine = CheckpointEngine(tmp_path)
    path = engine.save(TrainingState(per_rank={"rng": capture_rng("cpu")}), step=1)
    expected = draw()
    draw()
    loaded = engine.load(path, TrainingState())
    restore_rng(loaded.per_rank["rng"], "cpu")
    assert draw() == expected
