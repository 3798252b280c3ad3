"""Restore training state in place: read model tensors into existing memory, pass other state to ``load_state_dict``."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcaccel.checkpoint.manifest_writer import Index
from hpcaccel.checkpoint.optimizer_state import restore_optimizer, targets
from hpcaccel.checkpoint.training_state import Stateful, TrainingState, buffers_of, parameter_names, public_name
from hpcaccel.checkpoint.tree import pack, tensor_nodes, unpack
from hpcaccel.errors import CheckpointError

__all__ = ["Restorer"]

log = logging.getLogger(__name__)


class Restorer:
    """Restores a ``TrainingState``: call ``targets``, read into the tensors that it returns, then ``apply``.

    Args:
        tree: the shared tree.
        own: this rank's own tree; None if the checkpoint has none for this rank.
        own_buffers: whether this rank restores its own buffers. False if the world size has changed: all ranks then
            restore rank 0's buffers.
        index: dtypes and shapes of the stored tensors.
    """

    def __init__(self, state: TrainingState, *, tree: Any, own: Any, own_buffers: bool, index: Index) -> None:
        if tree.get("weights_only"):  # imported checkpoint: restore only the weights
            state = replace(state, optimizers=[], schedulers=[], scaler=None, objects={})
        self._state = state
        self._tree = tree
        self._own = None if own is None else own["state"]
        self._own_buffers: dict[str, Any] = own["buffers"] if own is not None and own_buffers else {}
        self._index = index
        self._tensors: dict[str, torch.Tensor] = {}
        self._models = [model.state_dict() for model in state.models]
        self._names = parameter_names(state.models)

    def targets(self) -> dict[str, torch.Tensor]:
        """Tensors to read into, by key: existing parameters and buffers, and new tensors for other state.

        Raises:
            CheckpointError: the models, optimizers, schedulers or objects differ from the saved ones.
        """
        self._compare()
        for position, (model, current) in enumerate(zip(self._state.models, self._models, strict=True)):
            if position not in self._state.without:
                self._target_model(model, current, self._tree["models"][position], f"models.{position}")
        for position, optimizer in enumerate(self._state.optimizers):
            path = f"optimizers.{position}"
            saved = self._tree["optimizers"][position]
            self._tensors.update(targets(optimizer, saved, self._names, path, self._index))
        for item, saved, path in self._stateful():
            templates = {}
            if any("sharded" in node for node in tensor_nodes(saved)):
                templates = pack(item.state_dict(), path).tensors
            self._target_plain(saved, templates)
        self._target_plain([self._tree["optimizers"], self._own, self._own_buffers], {})
        return self._tensors

    def apply(self) -> dict[str, Any] | None:
        """Restore everything from the tensors that were read.

        Returns:
            This rank's own state; None if the checkpoint has none for this rank.
        """
        with torch.no_grad():
            trees = zip(self._state.models, self._models, self._tree["models"], strict=True)
            for position, (model, current, saved) in enumerate(trees):
                if position not in self._state.without:
                    model.load_state_dict(
                        {key: self._model_entry(model, key, value, saved) for key, value in current.items()}
                    )
            buffers = buffers_of(self._state) if self._own_buffers else {}
            for key in self._own_buffers.keys() & buffers.keys():
                node = self._own_buffers[key]
                buffers[key].copy_(unpack(node, self._tensor))
        for optimizer, saved in zip(self._state.optimizers, self._tree["optimizers"], strict=True):
            restore_optimizer(optimizer, saved, self._names, self._tensor)
        for item, saved, _ in self._stateful():
            item.load_state_dict(unpack(saved, self._tensor))
        own: dict[str, Any] | None = None if self._own is None else unpack(self._own, self._tensor)
        return own

    def _tensor(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def _model_entry(self, model: nn.Module, key: str, current: Any, saved: dict[str, Any]) -> Any:
        value = unpack(saved[public_name(model, key)], self._tensor)
        shared = isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor) and value.shape == current.shape
        if shared and value is not current:
            return current.copy_(value)  # tied in the saved model, but not in this one
        return value

    def _stateful(self) -> list[tuple[Stateful, Any, str]]:
        """Each scheduler, the scaler (if there is one) and each object, with its saved tree and its path."""
        found = [
            (scheduler, self._tree["schedulers"][position], f"schedulers.{position}")
            for position, scheduler in enumerate(self._state.schedulers)
        ]
        if self._state.scaler is not None and self._tree["scaler"] is not None:
            found.append((self._state.scaler, self._tree["scaler"], "scaler"))
        found += [(item, self._tree["objects"][name], f"objects.{name}") for name, item in self._state.objects.items()]
        return found

    def _compare(self) -> None:
        for kind in ("models", "optimizers", "schedulers"):
            here, saved = len(getattr(self._state, kind)), len(self._tree[kind])
            if here != saved:
                raise CheckpointError(
                    f"number of {kind}: {saved} in the checkpoint, {here} in this program. Prepare the same {kind} "
                    "as when the checkpoint was saved"
                )
        missing = sorted(set(self._state.objects) - set(self._tree["objects"]))
        unknown = sorted(set(self._tree["objects"]) - set(self._state.objects))
        if missing or unknown:
            raise CheckpointError(
                "the loaders and registered objects do not match the checkpoint (missing from the checkpoint: "
                f"{missing or 'none'}; only in the checkpoint: {unknown or 'none'}). Prepare and register the "
                "same loaders and objects, in the same order as when the checkpoint was saved"
            )
        if (self._state.scaler is None) != (self._tree["scaler"] is None):
            if self._state.scaler is not None:
                log.warning("the checkpoint contains no gradient scaler: this training's scaler keeps its state")
            else:
                log.warning("the checkpoint contains a gradient scaler, but this training has none: it is ignored")

    def _target_model(self, model: nn.Module, current: dict[str, Any], saved: dict[str, Any] | None, path: str) -> None:
        if saved is None:
            raise CheckpointError(
                f"{path} is not in the checkpoint: the script's save hook saved it separately. Register the matching "
                "hook with register_load_state_pre_hook(). That hook must load the model and remove it from the list "
                "of models"
            )
        here = {public_name(model, key): value for key, value in current.items()}
        if self._tree.get("weights_only"):
            _add_tied(here, saved)
        problems = [f"{path}.{name} is not in the checkpoint" for name in here if name not in saved]
        problems += [f"{path}.{name} is only in the checkpoint" for name in saved if name not in here]
        for name in here.keys() & saved.keys():
            problems += self._target_entry(here[name], saved[name], f"{path}.{name}")
        if problems:
            more = f"\n  … and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise CheckpointError(
                f"the checkpoint does not match this model (number of differences: {len(problems)}):\n  "
                + "\n  ".join(sorted(problems)[:8])
                + more
            )

    def _target_entry(self, current: Any, saved: Any, name: str) -> list[str]:
        """Register the tensor that one entry of a model is read into. Returns a list with a message if the saved entry
        does not match the model, else an empty list."""
        is_tensor = isinstance(current, torch.Tensor) and isinstance(saved, dict) and saved.get("$") == "tensor"
        if not is_tensor or name.endswith("._extra_state"):  # extra state may be of any type
            self._target_plain(saved, {})
            return []
        stored = self._index.tensor(saved["key"])
        if current.device.type == "meta":
            return [f"{name} is on the meta device: allocate the model's memory with to_empty() before loading"]
        if tuple(stored.size) != tuple(current.shape):
            return [f"{name} has shape {tuple(stored.size)} in the checkpoint, {tuple(current.shape)} in this model"]
        if stored.properties.dtype != current.dtype:
            return [f"{name} is {stored.properties.dtype} in the checkpoint, {current.dtype} in this model"]
        self._tensors.setdefault(saved["key"], current)
        return []

    def _target_plain(self, tree: Any, templates: dict[str, torch.Tensor]) -> None:
        """Add new tensors for state that has no memory yet. Each is sharded like its template, if there is one, else
        unsharded."""
        for node in tensor_nodes(tree):
            key = node["key"]
            if key in self._tensors:
                continue
            stored = self._index.tensor(key)
            template = templates.get(key)
            if isinstance(template, DTensor) and tuple(template.shape) == tuple(stored.size):
                self._tensors[key] = torch.empty_like(template, dtype=stored.properties.dtype)
            else:
                device = _device(node.get("device", "cpu"))
                self._tensors[key] = torch.empty(stored.size, dtype=stored.properties.dtype, device=device)


def _add_tied(here: dict[str, Any], saved: dict[str, Any]) -> None:
    """Add tied names to ``saved``: files of other programs may contain a tied tensor under one name only."""
    by_place = {_place(value): saved[name] for name, value in here.items() if name in saved and _place(value)}
    for name, value in here.items():
        if name not in saved and _place(value) in by_place:
            saved[name] = by_place[_place(value)]


def _place(value: Any) -> Any:
    """Address and shape of a tensor, equal for tied tensors; None for a tensor without memory or address."""
    if not isinstance(value, torch.Tensor) or value.device.type in ("meta", "xla"):
        return None
    local = value.to_local() if isinstance(value, DTensor) else value
    return (local.data_ptr(), tuple(value.shape)) if local.numel() else None


def _device(kind: str) -> torch.device:
    """The current device of this kind if there is one, else the CPU."""
    module: Any = getattr(torch, kind, None)
    if kind == "cpu" or module is None or not getattr(module, "is_available", bool)():
        return torch.device("cpu")
    return torch.device(kind, module.current_device()) if hasattr(module, "current_device") else torch.device(kind)
