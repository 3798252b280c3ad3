"""A stand-in for torch_xla: its functions that hpcaccel calls, on tensors of the device ``xla`` without hardware.

torch's slot for vendors' devices (PrivateUse1) is renamed, so that ``torch.device("xla")`` has a device that autograd
can use.
"""

import cpu_tensors
import torch
from cpu_tensors import CALLS
from torch.utils import backend_registration

torch.utils.rename_privateuse1_backend("xla")
torch._register_device_module("xla", backend_registration._DummyBackendModule())
torch._C._acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
torch._C._acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())
cpu_tensors.register("xla")


def device(index=None):
    return torch.device("xla", 0)


def sync(wait=False, reset_scope=True):
    CALLS.append("sync")
