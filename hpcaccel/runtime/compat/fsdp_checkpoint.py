"""``save_fsdp_model`` and related functions, which trainers for Accelerate call: a sharded model and its optimizer in
files of Accelerate (see ``checkpointing/fsdp_files``)."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpcaccel.core.formatting import shortened
from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.checkpointing.export_model import named_state
from hpcaccel.runtime.checkpointing.sharded_load import LoadedWeights, device_of_model
from hpcaccel.runtime.compat.accelerator_files import OPTIMIZER_NAME
from hpcaccel.runtime.compat.introspection import is_peft_model
from hpcaccel.runtime.compat.standalone import settings_in_use
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.parallel import meta_device
from hpcaccel.runtime.parallel.ddp import unwrap
from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer

if TYPE_CHECKING:
    # These imports take half a second; a program needs them only at its first save or load.
    from hpcaccel.runtime.checkpointing.stored_state import StoredState, Way

__all__ = [
    "FSDP_MODEL_NAME",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]

FSDP_MODEL_NAME = "pytorch_model_fsdp"


# -- saving


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a model's weights to ``output_dir``, in files of Accelerate. All ranks call this.

    Args:
        fsdp_plugin: its ``state_dict_type`` selects the files; SHARDED_STATE_DICT if it is None.
        accelerator: not used: a process has one group of ranks.
        model_index: number of the model in the names of the files.
        adapter_only: whether to write only the active adapter of a PEFT model.
        use_dcp: whether sharded weights are written to a DCP directory. If not, each rank writes its shards to a file
            of its own, which only the same rank of the same number of ranks can load.

    Raises:
        RuntimeMisuse: some ranks did not call this; ``state_dict_type`` is unknown, or LOCAL_STATE_DICT.
        CheckpointError: the files cannot be written.
    """
    from hpcaccel.runtime.checkpointing.fsdp_files import FsdpFiles, kind_of

    kind = kind_of(fsdp_plugin)
    state = _model_state(model, adapter_only=adapter_only, kind=kind)
    FsdpFiles(output_dir, FSDP_MODEL_NAME, model_index, kind, use_dcp=use_dcp).save("model", state, settings_in_use())


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write an optimizer's state by parameter name, in files of Accelerate. All ranks call this.

    An optimizer that has not taken a step has no state, and Accelerate does not load such a checkpoint.

    Args, Raises: as ``save_fsdp_model``; ``model`` is the optimizer's model.
    """
    from hpcaccel.runtime.checkpointing.fsdp_files import FsdpFiles, kind_of

    optimizer, names = _raw(optimizer), _names(model)
    numbered = optimizer.state_dict()
    by_number = {
        number: names.get(parameter, f"parameter {number}")
        for group, listed in zip(optimizer.param_groups, numbered["param_groups"], strict=True)
        for parameter, number in zip(group["params"], listed["params"], strict=True)
    }
    state = {
        "state": {by_number.get(number, number): value for number, value in numbered["state"].items()},
        "param_groups": [
            {**group, "params": [by_number[number] for number in group["params"]]} for group in numbered["param_groups"]
        ],
    }
    files = FsdpFiles(output_dir, OPTIMIZER_NAME, optimizer_index, kind_of(fsdp_plugin), use_dcp=use_dcp)
    files.save("optimizer", state, settings_in_use())


# -- loading


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> LoadedWeights:
    """Load weights that ``save_fsdp_model``, here or in Accelerate, has written, into a model that may be sharded, in
    place. All ranks call this. The number of ranks may differ from that of the save, unless ``use_dcp`` is false.

    For FULL_STATE_DICT, rank 0 reads the file and sends the tensors to the other ranks.

    Args: as ``save_fsdp_model``; ``input_dir`` may also be the DCP directory itself.

    Returns:
        The missing names, which only an ``adapter_only`` checkpoint may have, and the unexpected names.

    Raises:
        CheckpointError: there is no such file; names are missing; shapes differ.
        Damaged: files are damaged.
        RuntimeMisuse: as ``save_fsdp_model``; or as ``load_sharded``.
    """
    from hpcaccel.runtime.checkpointing.fsdp_files import FsdpFiles, kind_of

    kind = kind_of(fsdp_plugin)
    if meta_device.is_empty(model):
        meta_device.give_memory(model, device_of_model(model))
    stored = FsdpFiles(input_dir, FSDP_MODEL_NAME, model_index, kind, use_dcp=use_dcp).open(settings_in_use())
    state = _model_state(model, adapter_only=adapter_only, kind=kind)
    targets = {(name,): one for name, one in state.items() if isinstance(one, torch.Tensor)}
    missing = [way[0] for way in targets if way not in stored.tensors]
    if missing and not adapter_only:
        raise CheckpointError(f"{stored.where} has no weights for {shortened(missing, 5)} of {type(model).__name__}")
    for way, target in targets.items():
        if way in stored.tensors:
            shape = stored.tensors[way][0]
            if shape != tuple(target.shape):
                raise CheckpointError(
                    f"{way[0]} has shape {shape} in {stored.where}, but {tuple(target.shape)} in the model"
                )
            stored.fill(way, target)
    if not missing:
        meta_device.has_values(model)
    World.current().group.wait_for_all("load_fsdp_model()")
    return LoadedWeights(missing, sorted(".".join(way) for way in stored.tensors.keys() - targets.keys()))


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Optimizer,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load an optimizer's state that ``save_fsdp_optimizer``, here or in Accelerate, has written. All ranks call this.

    Args, Raises: as ``load_fsdp_model``; ``model`` is the optimizer's model; ``adapter_only`` has no effect. A
        CheckpointError is also raised if the optimizer's parameter groups differ from the saved ones.
    """
    from hpcaccel.checkpoint.optimizer_state import load_exactly
    from hpcaccel.runtime.checkpointing.fsdp_files import FsdpFiles, kind_of

    optimizer, names = _raw(optimizer), _names(model)
    files = FsdpFiles(input_dir, OPTIMIZER_NAME, optimizer_index, kind_of(fsdp_plugin), use_dcp=use_dcp)
    stored = files.open(settings_in_use())
    numbered, values = optimizer.state_dict(), stored.values()
    below = _Below(stored, values)
    groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    exact: list[tuple[torch.Tensor, dict[str, Any]]] = []
    for place, (group, listed) in enumerate(zip(optimizer.param_groups, numbered["param_groups"], strict=True)):
        way = ("param_groups", str(place))
        members = dict(zip(listed["params"], group["params"], strict=True))
        here = {number: names.get(parameter, f"parameter {number}") for number, parameter in members.items()}
        saved = values.get((*way, "params"), [])
        if set(saved) != set(here.values()):
            raise CheckpointError(
                f"{stored.where}: parameter group {place} contains {shortened(sorted(saved), 5) or 'nothing'}, but "
                f"this optimizer's contains {shortened(sorted(here.values()), 5)}. Create the same groups"
            )
        groups.append({**listed, **below.read(way), "params": listed["params"]})
        for number, parameter in members.items():
            if found := below.read(("state", here[number]), parameter):
                state[number] = found
                exact.append((parameter, found))
    if ("param_groups", str(len(groups)), "params") in values:
        raise CheckpointError(f"{stored.where} has more parameter groups than this optimizer, which has {len(groups)}")
    load_exactly(optimizer, {**numbered, "state": state, "param_groups": groups}, exact)
    World.current().group.wait_for_all("load_fsdp_optimizer()")


class _Below:
    """Reads what is stored for a parameter, ``("state", name)``, or for a parameter group."""

    def __init__(self, stored: StoredState, values: Mapping[Way, Any]) -> None:
        self._stored = stored
        self._values = values
        self._ways: dict[Way, list[Way]] = defaultdict(list)
        for way in (*values, *stored.tensors):
            if len(way) > 2:
                self._ways[way[:2]].append(way)

    def read(self, parent: Way, parameter: torch.Tensor | None = None) -> dict[str, Any]:
        """Values and tensors, nested as they were saved. Tensors with the shape of ``parameter`` get its device and
        sharding; others are in CPU memory."""
        from hpcaccel.runtime.checkpointing.stored_state import put_together

        return put_together({way[2:]: self._value(way, parameter) for way in self._ways.get(parent, ())})

    def _value(self, way: Way, parameter: torch.Tensor | None) -> Any:
        if way in self._values:
            return self._values[way]
        shape, dtype = self._stored.tensors[way]
        if parameter is not None and shape and shape == tuple(parameter.shape):
            target = torch.empty_like(parameter.detach(), dtype=dtype)
        else:
            target = torch.empty(shape, dtype=dtype)
        self._stored.fill(way, target)
        return target


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the whole tensors of a DCP directory to one file in ``output_path``: ``model.safetensors``, or
    ``pytorch_model.bin``. An earlier file of this name is replaced. Rank 0 does this, and the other ranks wait for it;
    it works without a process group, too. One tensor at a time is in memory, except those of an optimizer.

    Args:
        checkpoint_dir: a directory such as ``pytorch_model_fsdp_0``, or ``optimizer_0``.
        safe_serialization: whether to write a safetensors file, which can store a model only.
        remove_checkpoint_dir: whether to delete ``checkpoint_dir`` afterwards.

    Raises:
        CheckpointError: on all ranks, if ``checkpoint_dir`` is not such a directory or is damaged, or the file cannot
            be written.
    """
    from hpcaccel.runtime.checkpointing.fsdp_files import merge

    merge(Path(checkpoint_dir), Path(output_path), safe=safe_serialization, remove=remove_checkpoint_dir)


# -- models and optimizers


def _model_state(model: nn.Module, *, adapter_only: bool, kind: str) -> dict[str, Any]:
    """The state dict to save, or whose tensors to fill. Of a PEFT model's adapter there are two forms, as in
    Accelerate: for FULL_STATE_DICT all parameters that are trained and all buffers, with the model's names; else PEFT's
    own state dict."""
    state = named_state(model)
    if not (adapter_only and is_peft_model(model)):
        return state
    if kind == "FULL_STATE_DICT":
        frozen = {name for parameter, name in _names(model).items() if not parameter.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}
    own: Any = unwrap(model)
    found: dict[str, Any] = sys.modules["peft"].get_peft_model_state_dict(own, adapter_name=own.active_adapter)
    return found


def _names(model: nn.Module) -> dict[torch.Tensor, str]:
    """The name of each parameter in the script's own module; the first one, if it is tied."""
    from hpcaccel.checkpoint.training_state import public_name

    names: dict[torch.Tensor, str] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, public_name(model, key))
    return names


def _raw(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
