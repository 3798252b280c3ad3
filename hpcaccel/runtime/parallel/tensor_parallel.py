"""Tensor parallel: the weights of single layers are shared among neighbouring ranks, by a plan that the user gives."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallel.dtensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["apply_plan", "find_plan", "is_shared", "share_generators"]


def find_plan(model: nn.Module, given: Any) -> dict[str, Any]:
    """The plan that was given, else the model's own (``tp_plan`` or ``_tp_plan``).

    Returns:
        A ``ParallelStyle`` by module name; ``*`` in a name stands for one part of it, as in ``layers.*.up``.

    Raises:
        RuntimeMisuse: there is none, or it holds something else.
    """
    plan = given or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise RuntimeMisuse(
            f"tensor parallel needs to know which modules of {type(model).__name__} are shared, and how: "
            'Accelerator(tp_plan={"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}), with the '
            "styles of torch.distributed.tensor.parallel, or an attribute tp_plan of the model"
        )
    return {name: _style(style, name) for name, style in plan.items()}


def _style(style: Any, name: str) -> Any:
    """
    Raises:
        RuntimeMisuse: neither a style of torch's nor the name of one.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel.style import ParallelStyle

    if isinstance(style, ParallelStyle):
        return style
    named = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    if style not in named:
        raise RuntimeMisuse(
            f"tp_plan[{name!r}] = {style!r} is not a ParallelStyle of torch.distributed.tensor.parallel "
            f"(nor one of: {', '.join(named)})"
        )
    return named[style]()


def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any]) -> None:
    """Share the planned modules' parameters over ``mesh``, in place.

    Raises:
        RuntimeMisuse: a name in the plan that matches no module, or a tensor that does not divide evenly.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    names = [name for name, _ in model.named_modules() if name]
    for pattern in plan:
        if pattern and not any(_matches(name, pattern) for name in names):
            raise RuntimeMisuse(
                f"tp_plan names {pattern!r}, which matches no module of {type(model).__name__} "
                f"(it has: {', '.join(names[:12])}{' …' if len(names) > 12 else ''})"
            )
    parallelize_module(model, mesh, dict(plan))
    _refuse_uneven(dict(model.named_parameters()), mesh)


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatch, parts, wanted))


def _refuse_uneven(parameters: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> None:
    for name, parameter in parameters.items():
        if not is_dtensor(parameter):
            continue
        for placement in parameter.placements:  # type: ignore[attr-defined]
            if placement.is_shard() and parameter.shape[placement.dim] % mesh.size():
                raise RuntimeMisuse(
                    f"{name} has {parameter.shape[placement.dim]} rows in dimension {placement.dim}, which "
                    f"{mesh.size()} tensor-parallel ranks cannot share evenly"
                )


def share_generators(mesh: DeviceMesh, device: torch.device) -> None:
    """Bring torch's generators of all ranks that share tensors to the same state: they draw the same dropout masks for
    what each of them has whole. Scripts seed per rank."""
    group = mesh.get_group()
    first = dist.get_global_rank(group, 0)
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    for state, restore in zip(states, (torch.set_rng_state, torch.cuda.set_rng_state), strict=False):
        sent = state.to(device)
        dist.broadcast(sent, src=first, group=group)
        restore(sent.cpu())


def is_shared(model: nn.Module) -> bool:
    """Whether a plan has been applied to the model already, by its author or by a library."""
    return any(is_dtensor(parameter) for parameter in model.parameters())
