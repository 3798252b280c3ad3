"""From what ``prepare`` gave back to the module that the script made."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpcaccel.runtime.parallel import compiling, precision

__all__ = ["unwrap"]


def unwrap(
    model: nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False, recursive: bool = False
) -> nn.Module:
    """The user's own module, without DDP and ``torch.compile``; one that was never prepared comes back as it is. A
    sharded model is the user's module already, with shards for parameters.

    Args:
        keep_fp32_wrapper: whether it goes on computing in the precision that was prepared; False: its own forward.
        keep_torch_compile: put the compiled wrapper around it again.
        recursive: look for wrappers inside the module too, and take them off in place.
    """
    inner, compiler = compiling.strip(model)
    while isinstance(inner, DistributedDataParallel | DataParallel) or compiling.is_compiled(inner):
        inner = inner.module if isinstance(inner, DistributedDataParallel | DataParallel) else compiling.strip(inner)[0]
    if recursive:
        for parent in list(inner.modules()):
            for name, child in parent.named_children():
                setattr(parent, name, unwrap(child))
    if not keep_fp32_wrapper:
        precision.unwrap_forward(inner)
    if keep_torch_compile and compiler is not None:
        again: nn.Module = compiler(inner)
        return again
    return inner
