"""Tensors of a device that does not exist: wrappers without memory of their own around tensors of the CPU.

Every operation is carried out on the CPU. So operations that mix devices fail as on hardware, ``data_ptr()`` is 0, and
a parameter that is moved to the device becomes another object.
"""

from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_map

CALLS = []
"""Names of collectives and of functions of the device's module, in the order in which they were called."""
GENERATOR = torch.Generator().manual_seed(0)
"""The device's random generator."""


class DeviceTensor(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
    kind = ""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=f"{cls.kind}:0",
        )

    def __init__(self, held):
        self.held = held

    def __repr__(self):
        return f"DeviceTensor({self.held})"

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return run(op, *args, **(kwargs or {}))


def is_here(device):
    return device is not None and torch.device(device).type == DeviceTensor.kind


def run(op, *args, **kwargs):
    """Carry out an operation on the CPU. Results that are inputs, as of in-place operations, stay the same objects."""
    inputs_by_id = {}

    def off_device(value):
        if isinstance(value, DeviceTensor):
            inputs_by_id[id(value.held)] = value
            return value.held
        return torch.device("cpu") if isinstance(value, torch.device) and is_here(value) else value

    def on_device(value):
        if type(value) is not torch.Tensor:
            return value
        return inputs_by_id[id(value)] if id(value) in inputs_by_id else DeviceTensor(value)

    if op.namespace == "c10d":
        CALLS.append(op.overloadpacket.__name__)
    inputs, options = tree_map(off_device, (args, kwargs))
    if op is torch.ops.aten._copy_from.default:  # from the CPU to the device, or back
        inputs[1].copy_(inputs[0])
        return args[1]
    if op is torch.ops.aten.copy_.default and not isinstance(args[0], DeviceTensor):
        return args[0].copy_(inputs[1])
    if torch.Tag.nondeterministic_seeded in op.tags:
        with drawing_from(GENERATOR):
            results = op(*inputs, **options)
    else:
        results = op(*inputs, **options)
    device = kwargs.get("device")
    return tree_map(on_device, results) if device is None or is_here(device) else results


@contextmanager
def drawing_from(generator):
    outer = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(outer)


_library = torch.library.Library("_", "IMPL")
_aten = torch.library.Library("aten", "IMPL")


def register(kind):
    """Let tensors of the device in torch's slot for vendors (PrivateUse1), now called ``kind``, run operations here."""
    DeviceTensor.kind = kind
    _library.fallback(run, "PrivateUse1")
    _library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _aten.impl("linear", _linear_under_autocast, "AutocastPrivateUse1")


def _linear_under_autocast(x, weight, bias=None):
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        dtype = torch.get_autocast_dtype(DeviceTensor.kind)
        cast = [None if part is None else part.to(dtype) for part in (x, weight, bias)]
        return torch.nn.functional.linear(*cast)
