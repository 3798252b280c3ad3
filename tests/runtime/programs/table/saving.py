"""Saving and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from hpcaccel import ProjectConfiguration, load_checkpoint_in_model
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.utils import extract_model_from_parallel

from . import anew, linear, numbers, refused, row, same, start, weight_of


class Count:
    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


@row("unwrap_model")
def unwrap(folder: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        accelerator = anew(strategy=strategy)
        raw = two_layers()
        model = accelerator.prepare(raw)
        assert accelerator.unwrap_model(model) is raw
        plain = two_layers()
        assert accelerator.unwrap_model(plain) is plain
        assert extract_model_from_parallel(model) is raw
        accelerator.end_training()
        assert accelerator.unwrap_model(model) is raw
    accelerator = anew()
    raw = two_layers()
    raw.config = {"hidden": 3}
    model = accelerator.prepare(raw)
    same(accelerator.unwrap_model(model).config, {"hidden": 3})
    if accelerator.num_processes > 1:
        with refused("unwrap_model", "config", kind=AttributeError):
            _ = model.config


@row("save, save_model, get_state_dict")
def files(folder: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        accelerator = anew(strategy=strategy)
        torch.manual_seed(1)
        raw = two_layers()
        expected = {name: value.clone() for name, value in raw.state_dict().items()}
        model, _ = accelerator.prepare(raw, SGD(raw.parameters(), lr=1.0))
        path = folder / f"{strategy}.pt"
        accelerator.save(accelerator.unwrap_model(model).state_dict(), path)
        state = accelerator.get_state_dict(model)
        accelerator.save_model(model, folder / strategy, max_shard_size="20B")
        accelerator.wait_for_everyone()
        loaded = torch.load(path, weights_only=True)
        same(list(loaded), list(expected))
        for name, value in expected.items():
            assert type(loaded[name]) is torch.Tensor
            assert torch.equal(loaded[name], value), name
            if accelerator.is_main_process:
                assert torch.equal(state[name], value), name
        assert (folder / strategy / "model.safetensors.index.json").exists()
        other = two_layers()
        load_checkpoint_in_model(other, folder / strategy)
        assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), expected.values(), strict=True))
        if strategy == "ddp" and accelerator.is_main_process:
            accelerator.save(accelerator.unwrap_model(model).state_dict(), folder / "main-only.pt")
            assert (folder / "main-only.pt").exists()


@row("save_state, load_state, register_for_checkpointing")
def states(folder: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        project = str(folder / strategy)
        accelerator = anew(strategy=strategy, project_dir=project)
        model, count = linear(1.0), Count()
        optimizer = SGD(model.parameters(), lr=0.25, momentum=0.5)
        loader = numbers(4 * accelerator.num_processes, 2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.register_for_checkpointing(count)
        with refused("state_dict"):
            accelerator.register_for_checkpointing(object())
        step(accelerator, model, optimizer)
        count.value = 5
        noise = torch.get_rng_state()
        where = accelerator.save_state(str(folder / strategy / "mine"))
        assert where
        step(accelerator, model, optimizer)
        after = accelerator.get_state_dict(model)
        count.value = 6
        torch.rand(3)
        accelerator.load_state(str(folder / strategy / "mine"))
        same(count.value, 5)
        assert torch.equal(torch.get_rng_state(), noise)
        step(accelerator, model, optimizer)
        again = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            same([float(v) for v in again.values()], [float(v) for v in after.values()])


def step(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    optimizer.zero_grad()


@row("save_state on the main process only")
def main_only(folder: Path) -> None:
    import warnings

    accelerator = start(project_dir=str(folder))
    model = accelerator.prepare(linear(3.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if accelerator.is_main_process:
            accelerator.save_state(str(folder / "main"))
    accelerator.wait_for_everyone()
    torch.nn.init.zeros_(accelerator.unwrap_model(model).weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator.load_state(str(folder / "main"))
    same(weight_of(accelerator, model), 3.0)


@row("save_state of a sharded model on the main process only")
def main_only_sharded(folder: Path) -> None:
    accelerator = start(strategy="fsdp", project_dir=str(folder))
    accelerator.prepare(two_layers())
    if accelerator.num_processes == 1:
        return
    # The default is one minute. A spec could set it, but there is no run directory here.
    object.__setattr__(accelerator._session.settings, "control_timeout_seconds", 4.0)
    with refused("saving.py", kind=RuntimeMisuse):
        if accelerator.is_main_process:
            accelerator.save_state(str(folder / "main"))
        accelerator.wait_for_everyone()


@row("ProjectConfiguration")
def project(folder: Path) -> None:
    config = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = start(project_config=config)
    same(accelerator.project_dir, str(folder))
    model = accelerator.prepare(linear(0.0))
    for turn in range(3):
        torch.nn.init.constant_(accelerator.unwrap_model(model).weight, float(turn))
        same(accelerator.save_iteration, turn)
        accelerator.save_state()
    accelerator.wait_for_everyone()
    same(sorted(path.name for path in (folder / "checkpoints").iterdir()), ["checkpoint_1", "checkpoint_2"])
    torch.nn.init.constant_(accelerator.unwrap_model(model).weight, 9.0)
    accelerator.load_state()
    same(weight_of(accelerator, model), 2.0)
    accelerator.wait_for_everyone()


@row("register_save_state_pre_hook and register_load_state_pre_hook")
def hooks(folder: Path) -> None:
    accelerator = start(project_dir=str(folder))
    model = accelerator.prepare(linear(1.0))
    called: list[str] = []

    def saving(models: list[nn.Module], weights: list[object], output_dir: str) -> None:
        called.append(f"save {len(models)} {Path(output_dir).name}")

    def loading(models: list[nn.Module], input_dir: str) -> None:
        called.append(f"load {len(models)} {Path(input_dir).name}")

    handles = [accelerator.register_save_state_pre_hook(saving), accelerator.register_load_state_pre_hook(loading)]
    accelerator.save_state(str(folder / "here"))
    accelerator.load_state(str(folder / "here"))
    same(called, ["save 1 here", "load 1 here"])
    for handle in handles:
        handle.remove()
    accelerator.save_state(str(folder / "there"))
    same(len(called), 2)
    assert model is not None
