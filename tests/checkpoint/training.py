"""A small training in every wrapping (DDP, FSDP, HSDP, compile), with a digest of its state."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpcaccel.checkpoint import CheckpointEngine, TrainingState, capture_rng, restore_rng

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "adamw-tensor-lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


class Net(nn.Module):
    """Tied weights, dropout, batch norm, and sizes that two and three ranks do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.body = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.GELU(), nn.Dropout(0.3), nn.Linear(13, 7))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


class Training:
    def __init__(self, wrap: str, optimizer: str = "adamw", *, seed: int = 0, rank: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = Net()
        if wrap == "ddp":
            self.model = DistributedDataParallel(self.model, find_unused_parameters=True)
        elif wrap == "fsdp":
            mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(self.model, mesh=mesh)
        elif wrap == "hsdp":
            fully_shard(self.model, mesh=dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))
        elif wrap == "compile":
            self.model.body = torch.compile(self.model.body, backend="eager")
            self.model = torch.compile(self.model, backend="eager")
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = (
            torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=100)
            if (optimizer == "adamw")
            else torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        )
        torch.manual_seed(1000 * seed + rank)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            tokens = torch.randint(0, 11, (6,))
            loss = nn.functional.cross_entropy(self.model(tokens), tokens)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def state(self) -> TrainingState:
        return TrainingState(
            models=[self.model], optimizers=[self.optimizer], schedulers=[self.scheduler], per_rank=capture_rng()
        )

    def load(self, engine: CheckpointEngine, path=None):
        loaded = engine.load(path or engine.find("auto"), self.state())
        if loaded.per_rank is not None:
            restore_rng(loaded.per_rank)
        return loaded

    def whole(self) -> dict[str, torch.Tensor]:
        """All weights, buffers and optimizer states in full, by a name that does not depend on the wrapping."""
        found = {}
        parameters = dict(self.model.named_parameters())
        for key, value in self.model.state_dict().items():
            name = key.replace("_orig_mod.", "").removeprefix("module.")
            found[name] = _full(value)
            for entry, item in self.optimizer.state.get(parameters.get(key), {}).items():
                if isinstance(item, torch.Tensor):
                    found[f"{name}:{entry}"] = _full(item)
        return found

    def digest(self, *, buffers: bool = True) -> str:
        text = hashlib.sha256()
        for name, value in sorted(self.whole().items()):
            if buffers or ("running" not in name and "num_batches" not in name):
                text.update(name.encode() + value.detach().contiguous().numpy().tobytes())
        return text.hexdigest()


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def engine(directory, rank: int = 0, world_size: int = 1, **options) -> CheckpointEngine:
    return CheckpointEngine(directory, rank=rank, world_size=world_size, **options)
