"""What the Accelerator's methods do with models and files, as functions of their own."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.parallel.compiling import compile_blocks, compile_whole
from hpcaccel.runtime.parallel.unwrapping import unwrap

__all__ = ["compile_regions", "extract_model_from_parallel", "load", "save"]


def save(
    obj: Any, f: str | os.PathLike[str] | Any, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write ``obj`` on the main process, or on the first one of each node. All ranks may call; where it holds the
    shards of a model, all must.

    Raises:
        RuntimeMisuse: some ranks did not call, and there are shards; or it cannot be written in that form.
    """
    from hpcaccel.runtime.checkpointing import export_model
    from hpcaccel.runtime.settings import Settings
    from hpcaccel.runtime.training_session import Session

    session = Session.existing()
    settings = Settings() if session is None else session.settings
    group = World.current().group
    export_model.save(obj, f, group, settings, safe=safe_serialization, on_each_node=save_on_each_node)


def load(f: str | os.PathLike[str] | Any, map_location: Any = None, **kwargs: Any) -> Any:
    """``torch.load`` of tensors and plain containers; of anything with ``weights_only=False``, for a trusted file."""
    kwargs.setdefault("weights_only", True)
    return torch.load(f, map_location=map_location, **kwargs)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False, recursive: bool = False
) -> nn.Module:
    """The module as the script made it: see ``Accelerator.unwrap_model``."""
    return unwrap(
        model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile, recursive=recursive
    )


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile repeated blocks in place, each on its own, so that one compilation serves all; a model without any is
    compiled in one piece."""
    if compile_blocks(module, compile_kwargs):
        return module
    return compile_whole(module, compile_kwargs)
