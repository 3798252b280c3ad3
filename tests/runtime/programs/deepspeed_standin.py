"""A small stand-in for the package deepspeed, with the part of its engine that hpcaccel calls, for any ZeRO stage.

``install()`` makes ``import deepspeed`` find it. Nothing is sharded: each rank has the whole model, and its optimizer
file is its own. tests/integrations/test_deepspeed_engine.py compares its methods with those of the real engine.
"""

import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_


class LossScaler:
    def __init__(self, scale=1.0):
        self.cur_scale = scale


class TorchCheckpointEngine:
    def makedirs(self, path, exist_ok=False):
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def save(self, state_dict, path):
        torch.save(state_dict, path)

    def load(self, path, map_location=None):
        return torch.load(path, map_location=map_location, weights_only=False)

    def is_decoupled(self):
        return False


class ZeroOptimizer:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.overflow = False
        self.loss_scaler = LossScaler()

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def state_dict(self):
        return {"base_optimizer_state": self.optimizer.state_dict(), "loss_scaler": self.loss_scaler}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["base_optimizer_state"])
        self.loss_scaler = state["loss_scaler"]


class DeepSpeedEngine(nn.Module):
    def __init__(self, model, optimizer, lr_scheduler, config):
        super().__init__()
        self.module = model
        self.optimizer = optimizer if optimizer is None else ZeroOptimizer(optimizer)
        self.lr_scheduler = lr_scheduler
        self.checkpoint_engine = TorchCheckpointEngine()
        self.global_steps = 0
        self.calls = []
        self._config = config
        self._boundary = None
        self._norm = None
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def gradient_accumulation_steps(self):
        return self._config["gradient_accumulation_steps"]

    def gradient_clipping(self):
        return self._config.get("gradient_clipping", 0.0)

    def train_micro_batch_size_per_gpu(self):
        return self._config["train_micro_batch_size_per_gpu"]

    def zero_optimization_stage(self):
        return self._config["zero_optimization"]["stage"]

    def set_gradient_accumulation_boundary(self, is_boundary):
        self._boundary = is_boundary

    def is_gradient_accumulation_boundary(self):
        return self._boundary

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True):
        self.calls.append("backward")
        (loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss).backward(retain_graph=retain_graph)

    def step(self, lr_kwargs=None):
        assert self.is_gradient_accumulation_boundary(), "step() is called at boundaries only"
        self.calls.append("step")
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self._norm = clip_grad_norm_(self.module.parameters(), self.gradient_clipping() or float("inf"))
        if not self.optimizer.overflow:
            self.optimizer.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.optimizer.optimizer.zero_grad()
        self.global_steps += 1

    def get_global_grad_norm(self):
        return self._norm

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True):
        folder, rank = Path(save_dir) / tag, dist.get_rank()
        self.checkpoint_engine.makedirs(str(folder), exist_ok=True)
        dist.barrier()
        state = {"module": self.module.state_dict(), "global_steps": self.global_steps}
        if rank == 0:
            self.checkpoint_engine.save(state, str(folder / "mp_rank_00_model_states.pt"))
            self._copy_recovery_script(save_dir)
        own = {"optimizer_state_dict": self.optimizer.state_dict()}
        self.checkpoint_engine.save(own, str(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
        dist.barrier()
        return True

    def _copy_recovery_script(self, save_path):
        Path(save_path, "zero_to_fp32.py").write_text("")

    def load_checkpoint(self, load_dir, tag=None):
        folder = Path(load_dir) / tag
        state = self.checkpoint_engine.load(str(folder / "mp_rank_00_model_states.pt"))
        self.module.load_state_dict(state["module"])
        self.global_steps = state["global_steps"]
        own = self.checkpoint_engine.load(str(folder / f"zero_pp_rank_{dist.get_rank()}_mp_rank_00_optim_states.pt"))
        self.optimizer.load_state_dict(own["optimizer_state_dict"])
        return str(folder), {}

    def compile(self, backend=None, compile_kwargs=None):
        self.calls.append(f"compile {backend}")

    def destroy(self):
        self.calls.append("destroy")

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        return dict(self.module.state_dict()) if dist.get_rank() == 0 else None


def initialize(args=None, model=None, optimizer=None, model_parameters=None, lr_scheduler=None, config=None):
    assert args.device_rank == 0
    assert not any("auto" in (value, *(value.values() if isinstance(value, dict) else ())) for value in config.values())
    if optimizer is None and "optimizer" in config:
        optimizer = torch.optim.AdamW(model_parameters or model.parameters(), **config["optimizer"]["params"])
    if callable(lr_scheduler):
        lr_scheduler = lr_scheduler(optimizer)
    engine = DeepSpeedEngine(model, optimizer, lr_scheduler, config)
    return engine, engine.optimizer, None, engine.lr_scheduler


def install():
    """Make this module the package deepspeed, with the modules whose classes its checkpoints contain."""
    this = sys.modules[__name__]
    sys.modules["deepspeed"] = this
    for name, members in {
        "runtime.fp16.loss_scaler": {"LossScaler": LossScaler},
        "runtime.zero.config": {},
        "utils.tensor_fragment": {},
    }.items():
        module = ModuleType(f"deepspeed.{name}")
        vars(module).update(members)
        sys.modules[module.__name__] = module
