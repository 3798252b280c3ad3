"""A stand-in for a vendor's package: importing it adds the device ``npu`` to torch, without hardware or a compiler.
Collectives (``hccl``) run on gloo."""

import cpu_tensors
import torch
import torch.distributed as dist
from cpu_tensors import CALLS, GENERATOR
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class NpuModule:
    """What torch, and hpcaccel, call as ``torch.npu``."""

    def is_initialized(self):
        return True

    def is_available(self):
        return True

    def _is_in_bad_fork(self):
        return False

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def set_device(self, device):
        CALLS.append("set_device")

    def manual_seed(self, seed):
        GENERATOR.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device="npu"):
        return GENERATOR.get_state()

    def set_rng_state(self, state, device="npu"):
        GENERATOR.set_state(state)

    def synchronize(self, device=None):
        CALLS.append("synchronize")

    def empty_cache(self):
        CALLS.append("empty_cache")

    def get_device_name(self, device=None):
        return "Stand-in 910"

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


def hccl(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


_setup_privateuseone_for_python_backend("npu", backend_module=NpuModule())
cpu_tensors.register("npu")
dist.Backend.register_backend("hccl", hccl, devices=["npu"])
