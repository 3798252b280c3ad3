"""Gradient clipping for scaled, accumulated and sharded gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import xla_device
from hpcaccel.runtime.distributed.device_mesh import is_dtensor
from hpcaccel.runtime.training.lomo import refuse_clipping

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator_setup import Setup

__all__ = ["clip_norm", "clip_value", "unscale"]

Parameters = torch.Tensor | Iterable[torch.Tensor]

_PLAIN = {torch.Tensor, torch.nn.Parameter}
"""Types of parameters whose gradients are clipped by torch's own function."""


def clip_norm(setup: Setup, parameters: Parameters, *, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale gradients so that their norm over all ranks is at most ``max_norm``.

    Returns:
        The norm before scaling. Between accumulation boundaries nothing is scaled, and the norm is that of the
        gradients accumulated so far, which the ranks may not have reduced yet.
    """
    parameters = _listed(parameters)
    gradients = _gradients(parameters)
    if not gradients:
        refuse_clipping(setup.session.optimizers, parameters, "clip_grad_norm_")
    if not setup.accumulation.is_boundary:
        norm = _total_norm(gradients, norm_type)
        return norm if setup.scaling is None else setup.scaling.norm_of_scaled(norm)
    _reduce_and_unscale(setup, parameters)
    if _PLAIN.issuperset(map(type, parameters)):
        if _are_alike(gradients):
            return _clip_alike(gradients, float(max_norm), float(norm_type))
        return clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
    gradients = _gradients(parameters)
    norm = _total_norm(gradients, norm_type)
    clip_grads_with_norm_(_Holder.of(gradients), max_norm, norm)
    return norm


def clip_value(setup: Setup, parameters: Parameters, *, limit: float) -> None:
    """At accumulation boundaries, clamp gradients to the range from ``-limit`` to ``limit``."""
    if not setup.accumulation.is_boundary:
        return
    parameters = _listed(parameters)
    if all(parameter.grad is None for parameter in parameters):
        refuse_clipping(setup.session.optimizers, parameters, "clip_grad_value_")
    _reduce_and_unscale(setup, parameters)
    clip_grad_value_(_Holder.of(_gradients(parameters)), limit)


def unscale(setup: Setup, optimizers: Any = None) -> None:
    """At accumulation boundaries, divide the fp16 gradients of these optimizers by the loss scale, once per step.

    If ``optimizers`` is None, this applies to all prepared optimizers.

    Raises:
        RuntimeMisuse: an object is not a prepared optimizer.
    """
    if setup.scaling is None or not setup.accumulation.is_boundary:
        return
    if optimizers is None:
        optimizers = setup.prepared.optimizers
    elif not isinstance(optimizers, list | tuple):
        optimizers = [optimizers]
    for optimizer in optimizers:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if all(optimizer is not known for known in setup.prepared.optimizers):
            raise RuntimeMisuse(f"unscale_gradients({optimizer!r}): pass the optimizer to prepare() first")
        if (reducer := xla_device.reducer(setup.session.group)) is not None:
            reducer.reduce(optimizer)
        setup.scaling.unscale(optimizer)


def _reduce_and_unscale(setup: Setup, parameters: Sequence[torch.Tensor]) -> None:
    """Average over the ranks, where DDP does not, and unscale the gradients of each optimizer that has any of these
    parameters."""
    reducer = xla_device.reducer(setup.session.group)
    if setup.scaling is None and reducer is None:
        return
    optimizers = setup.prepared.optimizers
    if len(optimizers) > 1:
        wanted = {id(parameter) for parameter in parameters}
        optimizers = [
            optimizer
            for optimizer in optimizers
            if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"])
        ]
    for optimizer in optimizers:
        if reducer is not None:
            reducer.reduce(optimizer)
        if setup.scaling is not None:
            setup.scaling.unscale(optimizer)


def _listed(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class _Holder:
    """Stands for a parameter in calls of torch's in-place functions, which change its ``grad``. For a sharded gradient
    ``grad`` is this rank's shard."""

    __slots__ = ("grad",)

    def __init__(self, grad: torch.Tensor) -> None:
        self.grad = grad

    @classmethod
    def of(cls, gradients: Iterable[torch.Tensor]) -> Any:
        return [cls(_local(gradient)) for gradient in gradients]


def _local(gradient: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = gradient.to_local() if is_dtensor(gradient) else gradient  # type: ignore[attr-defined]
    return part


# -- norm of plain tensors of one kind, without the two searches for kinds in torch's own function -------------------


def _are_alike(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether the gradients are plain tensors of one type on one CPU or GPU."""
    return (
        set(map(type, gradients)) == {torch.Tensor}
        and len({(gradient.device, gradient.dtype) for gradient in gradients}) == 1
        and gradients[0].device.type in ("cpu", "cuda")
    )


def _clip_alike(gradients: list[torch.Tensor], max_norm: float, order: float) -> torch.Tensor:
    """Clip as ``torch.nn.utils.clip_grad_norm_`` does, by the same operations and so with the same result."""
    with torch.no_grad():
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, order)), order)
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


# -- norm of tensors with different shardings ------------------------------------------------------------------------


@torch.no_grad()
def _total_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Norm of all gradients together, of full tensors and of shards. Collective over the ranks of the meshes."""
    order = float(norm_type)
    parts_by_mesh: dict[Any, list[torch.Tensor]] = {}
    """This rank's shards, by mesh and by the mesh dimensions that divide the gradient. The keys are in the order of the
    gradients, which is the same on all ranks."""
    for gradient in gradients:
        where, part = _shard_of(gradient) if is_dtensor(gradient) else (None, gradient)
        parts_by_mesh.setdefault(where, []).append(part)
    norms = [_norm_over(where, parts, order) for where, parts in parts_by_mesh.items()]
    if len(norms) == 1:
        return norms[0]
    if not norms:
        return torch.tensor(0.0)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), order)
    return norm


def _shard_of(gradient: Any) -> tuple[Any, torch.Tensor]:
    """Returns ``((mesh, dimensions), shard)``: the mesh of a gradient, the mesh dimensions over which the gradient is
    sharded, and this rank's shard."""
    placements = gradient.placements
    if any(placement.is_partial() for placement in placements):
        from torch.distributed.tensor import Replicate

        whole = [Replicate() if placement.is_partial() else placement for placement in placements]
        gradient = gradient.redistribute(placements=whole)
    mesh = gradient.device_mesh
    divided = tuple(number for number, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return (mesh, divided), gradient.to_local()


def _norm_over(where: Any, parts: list[torch.Tensor], order: float) -> torch.Tensor:
    # A small tensor has empty shards on some ranks, and the maximum of an empty tensor is undefined.
    parts = [part for part in parts if part.numel()] or [torch.zeros(1, device=parts[0].device)]
    norm: torch.Tensor = get_total_norm(parts, order)
    if where is None or not where[1]:
        return norm
    mesh, divided = where
    largest = math.isinf(order)
    norm = norm.to(mesh.device_type)
    total: torch.Tensor = norm if largest else norm.pow(order)
    for number in divided:
        torch.distributed.all_reduce(
            total,
            torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM,
            group=mesh.get_group(number),
        )
    if not largest:
        total = total.pow(1 / order)
    return total
