"""Gradient clipping that is right for scaled, accumulated and sharded gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hpcaccel.runtime.dtensors import full
from hpcaccel.runtime.session import Session

__all__ = ["clip_norm", "clip_value"]


def clip_norm(
    session: Session, parameters: torch.Tensor | Iterable[torch.Tensor], *, max_norm: float, norm_type: float
) -> torch.Tensor | None:
    """Scale gradients so that their norm over all ranks is at most ``max_norm``; gives the norm before."""
    parameters = _listed(parameters)
    if not session.accumulation.is_boundary:
        return None
    _unscale(session, parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
    return full(norm)


def clip_value(session: Session, parameters: torch.Tensor | Iterable[torch.Tensor], *, limit: float) -> None:
    parameters = _listed(parameters)
    if session.accumulation.is_boundary:
        _unscale(session, parameters)
        torch.nn.utils.clip_grad_value_(parameters, limit)


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _unscale(session: Session, parameters: list[torch.Tensor]) -> None:
    """Undo fp16's scaling in the optimizers of these parameters, before their gradients are looked at."""
    if session.scaler is None:
        return
    wanted = set(parameters)
    for optimizer in session.prepared.optimizers:
        if any(parameter in wanted for group in optimizer.param_groups for parameter in group["params"]):
            session.scaler.unscale_(optimizer)
