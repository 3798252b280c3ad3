"""Joining the group of ranks, and leaving it.

Two groups: the default one is the user's and the gradients' (NCCL where there are GPUs, gloo elsewhere); the control
group is gloo on its own sockets, for the agreement on when to stop and for checkpoints, so that neither meets a
collective that belongs to somebody else.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.runtime.env import RankEnvironment
from hpcaccel.runtime.settle import settle

__all__ = ["Group", "choose_device", "initialise_alone", "join"]

TIMEOUT_SECONDS = 1800.0
EXIT_WAIT_SECONDS = 120.0
"""How long a rank that has reached the end of the program waits for the others."""


@dataclass(frozen=True)
class Group:
    """The ranks that train together. The groups are None where this process is alone.

    ``control`` carries the stop agreement and checkpoints, ``calls`` what the script calls by itself: so neither meets
    a collective that belongs to the other, even when some ranks call and some do not. ``data_rank`` and ``data_size``
    say which part of the data this rank trains on; ranks that share each tensor see the same part.
    """

    env: RankEnvironment
    device: torch.device
    control: dist.ProcessGroup | None
    calls: dist.ProcessGroup | None = None
    store: Any | None = None
    tensor_size: int = 1

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def world_size(self) -> int:
        return self.env.world_size

    @property
    def is_main(self) -> bool:
        return self.env.rank == 0

    @property
    def data_rank(self) -> int:
        return self.env.rank // self.tensor_size

    @property
    def data_size(self) -> int:
        return self.env.world_size // self.tensor_size

    def barrier(self) -> None:
        """Wait for all ranks, on the user's group."""
        if self.world_size > 1:
            dist.barrier(device_ids=[self.device.index or 0] if self.device.type == "cuda" else None)

    def max_of(self, value: int) -> int:
        """The largest of all ranks' values, on the control group."""
        if self.control is None:
            return value
        box = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.control)
        return int(box.item())

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def meet(self) -> None:
        """Wait for all ranks, on the control group."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def meet_at_exit(self) -> bool:
        """Wait a bounded time for all ranks to reach the end of the program; False where some did not come."""
        if self.control is None:
            return True
        try:
            dist.monitored_barrier(group=self.control, timeout=timedelta(seconds=EXIT_WAIT_SECONDS))
        except RuntimeError as error:
            print(f"hpcaccel: rank {self.rank} leaves without the others: {error}", file=sys.stderr, flush=True)
            return False
        return True

    def leave(self) -> None:
        """Destroy the groups. All ranks must have met just before: a rank that goes early makes others abort."""
        if dist.is_initialized():
            settle()
            dist.destroy_process_group()


def choose_device(env: RankEnvironment, *, cpu: bool) -> torch.device:
    """The rank's device: its one visible GPU, or the GPU of its local rank, or the CPU.

    Raises:
        RankEnvironmentError: this node has fewer visible GPUs than ranks.
    """
    if cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and env.local_world_size > 1 and not _own_gpu():
        raise RankEnvironmentError(_too_few(env, count))
    index = 0 if count == 1 else env.local_rank
    if index >= count:
        raise RankEnvironmentError(_too_few(env, count))
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _own_gpu() -> bool:
    """Whether the launcher gave this rank a GPU of its own, as Slurm does with ``--gpus-per-task=1``."""
    return bool(os.environ.get("CUDA_VISIBLE_DEVICES"))


def _too_few(env: RankEnvironment, count: int) -> str:
    return (
        f"local rank {env.local_rank} has no GPU: this node shows {count} to {env.local_world_size} ranks "
        f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). "
        "Ask for as many GPUs per node as ranks, or train with Accelerator(cpu=True)"
    )


def join(
    env: RankEnvironment, device: torch.device, *, backend: str | None = None, timeout: timedelta | None = None
) -> Group:
    """Form the groups; a group that the script has formed already is used as it is.

    Args:
        backend: torch's name of one; default: NCCL for GPU tensors, gloo for the others.
        timeout: of the default group's and the script's own collectives.

    Raises:
        RankEnvironmentError: the ranks did not find each other.
    """
    timeout = timeout or timedelta(seconds=TIMEOUT_SECONDS)
    if env.world_size == 1 and not dist.is_initialized():
        return Group(env, device, None)
    if not dist.is_initialized():
        _initialise(env, device, backend or _backend(device), timeout)
    if env.world_size == 1:
        return Group(env, device, None)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    calls = dist.new_group(backend="gloo", timeout=timeout)
    store = dist.distributed_c10d._get_default_store()
    return Group(env, device, control, calls, dist.PrefixStore("hpcaccel", store))  # type: ignore[attr-defined]


def initialise_alone(device: torch.device, timeout: timedelta) -> None:
    """A default group of this process alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(_backend(device), store=store, rank=0, world_size=1, timeout=timeout, **_device_id(device))


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _device_id(device: torch.device) -> dict[str, Any]:
    return {"device_id": device} if device.type == "cuda" else {}


def _initialise(env: RankEnvironment, device: torch.device, backend: str, timeout: timedelta) -> None:
    os.environ.update(env.variables)
    try:
        dist.init_process_group(backend, timeout=timeout, **_device_id(device))
    except (RuntimeError, ValueError) as error:
        raise RankEnvironmentError(
            f"rank {env.rank} of {env.world_size} could not join the others at "
            f"{env.master_addr}:{env.master_port}: {error}. "
            "Did all ranks start, is the address reachable from this node, and is the port free?"
        ) from error
