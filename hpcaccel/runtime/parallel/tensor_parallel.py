"""Tensor parallelism: layers' weights are sharded over neighbouring ranks, according to the user's plan."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hpcaccel.checkpoint.device_generator import device_generator
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.device_mesh import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["apply_plan", "find_plan", "is_shared", "share_generators"]


def find_plan(model: nn.Module, given: Any) -> dict[str, Any]:
    """The plan ``given``, else the model's own plan (``tp_plan`` or ``_tp_plan``).

    Returns:
        A dict of ``ParallelStyle`` by module name. In a name, ``*`` matches one part, as in ``layers.*.up``.

    Raises:
        RuntimeMisuse: there is no plan, or a value in the plan is not a style.
    """
    plan = given or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise RuntimeMisuse(
            f"tensor parallelism needs a plan that lists the modules of {type(model).__name__} to shard. Pass "
            'Accelerator(tp_plan={"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}) with styles '
            "of torch.distributed.tensor.parallel, or set the model's tp_plan attribute"
        )
    return {name: _style(style, name) for name, style in plan.items()}


def _style(style: Any, name: str) -> Any:
    """``style``, or the torch style that it names.

    Raises:
        RuntimeMisuse: ``style`` is neither a torch style nor the name of one.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel.style import ParallelStyle

    if isinstance(style, ParallelStyle):
        return style
    named = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    if style not in named:
        raise RuntimeMisuse(
            f"tp_plan[{name!r}] = {style!r} is neither a ParallelStyle of torch.distributed.tensor.parallel nor one "
            f"of: {', '.join(named)}"
        )
    return named[style]()


def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any]) -> None:
    """Shard the planned modules' parameters over ``mesh``, in place.

    Raises:
        RuntimeMisuse: a name in the plan matches no module, or a parameter does not divide evenly over the ranks.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    names = [name for name, _ in model.named_modules() if name]
    for pattern in plan:
        if pattern and not any(_matches(name, pattern) for name in names):
            raise RuntimeMisuse(
                f"tp_plan: {pattern!r} matches no module of {type(model).__name__} "
                f"(has: {', '.join(names[:12])}{' …' if len(names) > 12 else ''})"
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
                    f"dimension {placement.dim} of {name} has size {parameter.shape[placement.dim]}, which is not "
                    f"divisible by the {mesh.size()} tensor-parallel ranks. Change their number, or remove the module "
                    "from tp_plan"
                )


def share_generators(mesh: DeviceMesh, device: torch.device) -> None:
    """Set torch's generators on all tensor-parallel ranks to the first rank's state, so that they draw the same dropout
    masks for replicated tensors even if the script seeds each rank differently."""
    group = mesh.get_group()
    first = dist.get_global_rank(group, 0)
    generators = [(torch.get_rng_state, torch.set_rng_state), device_generator(device)]
    for read, restore in filter(None, generators):
        sent = read().to(device)
        dist.broadcast(sent, src=first, group=group)
        restore(sent.cpu())


def is_shared(model: nn.Module) -> bool:
    """Whether some of the model's parameters are sharded already: the script or a library has applied a plan."""
    return any(is_dtensor(parameter) for parameter in model.parameters())
