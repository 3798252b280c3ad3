"""Seeds, deterministic algorithms and thread counts, on which bit-identical resumes depend."""

from __future__ import annotations

import os
import random
import sys
from importlib.util import find_spec

import torch

__all__ = ["make_deterministic", "mix", "set_seed", "share_threads"]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's (if installed) and torch's generators, including those of GPUs.

    Args:
        seed: the seed of all generators.
        device_specific: seed with ``seed`` plus the rank, so that each rank draws different numbers.
        deterministic: use torch's bit-reproducible algorithms, which are slower.
    """
    if device_specific:
        seed += _rank()
    random.seed(seed)
    if "numpy" in sys.modules or find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if "torch_xla" in sys.modules:  # torch.manual_seed does not seed it
        from hpcaccel.runtime.distributed import xla_device

        xla_device.manual_seed(seed)
    if deterministic:
        make_deterministic()


def _rank() -> int:
    """This process's rank, even before the process groups exist."""
    from hpcaccel.runtime.distributed import rank_env
    from hpcaccel.runtime.distributed.world import World

    world = World.existing()
    return (rank_env.detect() if world is None else world.env).rank


def mix(*parts: int) -> int:
    """Hash several numbers into one 63-bit seed (splitmix64's finaliser)."""
    value = 0
    for part in parts:
        value = (value ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value >> 1


def make_deterministic() -> None:
    """Select deterministic algorithms in torch, cuBLAS, cuDNN and NCCL. Call before CUDA and NCCL are initialised."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def share_threads(local_world_size: int) -> None:
    """Set torch's number of threads to SLURM_CPUS_PER_TASK, else to this rank's share of the cores that this process
    may use. If OMP_NUM_THREADS is set, do nothing."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    cores = int(given) if given.isdigit() else len(os.sched_getaffinity(0)) // local_world_size
    torch.set_num_threads(max(1, cores))
