"""The objects that a script has prepared and registered, and its hooks for saving and loading."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.device_mesh import is_dtensor

if TYPE_CHECKING:
    # These imports take half a second; a program needs them only at its first save or load.
    from hpcaccel.checkpoint import TrainingState
    from hpcaccel.checkpoint.attached_files import AttachedFiles
    from hpcaccel.checkpoint.training_state import Stateful

__all__ = ["PreparedObjects", "add_hook"]

Hooks = dict[int, Callable[..., Any]]


class StoredTensors(NamedTuple):
    """Models and optimizers whose tensors this package saves and loads."""

    models: list[nn.Module]
    optimizers: list[Optimizer]


@dataclass
class PreparedObjects:
    """The prepared objects in order of preparation, the registered objects, and the hooks.

    Models and loaders are the prepared ones; optimizers and schedulers are the script's own. With DeepSpeed, the model
    is the engine, and the optimizer is the engine's.
    """

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Stateful] = field(default_factory=list)
    loaders: list[Stateful] = field(default_factory=list)
    registered: list[Stateful] = field(default_factory=list)
    scaler: Stateful | None = None
    attached: AttachedFiles | None = None
    """DeepSpeed's engine, which saves and loads the model, the optimizer and its scheduler itself; None if there is
    none."""
    mesh: dict[str, Any] = field(default_factory=dict)
    """Layout of the ranks; see ``TrainingState``."""
    # RemovableHandle keeps a weak reference to the dict, which a plain dict does not support.
    save_hooks: Hooks = field(default_factory=OrderedDict)
    load_hooks: Hooks = field(default_factory=OrderedDict)

    @property
    def stored(self) -> StoredTensors:
        """The models and optimizers of the script. None with DeepSpeed, whose engine saves and loads its own."""
        return StoredTensors(self.models, self.optimizers) if self.attached is None else StoredTensors([], [])

    @property
    def is_sharded(self) -> bool:
        """Whether no rank can save or load alone: each holds only a part, or DeepSpeed's engine writes the files."""
        if self.attached is not None:
            return True
        return any(is_dtensor(parameter) for model in self.models for parameter in model.parameters())

    def register(self, objects: Iterable[Any]) -> None:
        """Add objects that are saved and restored with the training. An object that is already registered is skipped.

        Raises:
            RuntimeMisuse: some objects lack ``state_dict`` or ``load_state_dict``. The message lists these objects.
        """
        objects = list(objects)
        wrong = [
            f"item {index} has type {type(item).__qualname__}"
            for index, item in enumerate(objects)
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
        ]
        if wrong:
            raise RuntimeMisuse(
                "register_for_checkpointing() requires objects with state_dict() and load_state_dict(), but "
                + ", ".join(wrong)
            )
        present = {id(item) for item in self.registered}
        for item in objects:
            if id(item) not in present:
                present.add(id(item))
                self.registered.append(item)

    def as_state(self, counters: Stateful, per_rank: dict[str, Any]) -> TrainingState:
        """The training state to save or to restore.

        Args:
            counters: the loop's steps and epochs.
            per_rank: values of this rank only, such as its random state.
        """
        from hpcaccel.checkpoint import TrainingState

        objects: dict[str, Stateful] = {"loop": counters}
        objects |= {f"loader.{index}": loader for index, loader in enumerate(self.loaders)}
        objects |= {f"registered.{index}": item for index, item in enumerate(self.registered)}
        return TrainingState(
            models=self.stored.models,
            optimizers=self.stored.optimizers,
            schedulers=self.schedulers,
            scaler=self.scaler,
            objects=objects,
            per_rank=per_rank,
            mesh=self.mesh,
            attached=self.attached,
        )

    def run_save_hooks(self, directory: str) -> frozenset[int]:
        """Call each ``hook(models, weights, directory)``, with the models' state dicts as ``weights``.

        Returns:
            Positions of the models that a hook removed from either list because it saved them itself.
        """
        models, stored = list(self.models), self.stored.models
        weights = [model.state_dict() for model in stored]
        remaining = list(weights)
        for hook in self.save_hooks.values():
            hook(models, remaining, directory)
        weights_left, models_left = {id(item) for item in remaining}, {id(item) for item in models}
        return frozenset(
            position
            for position, (model, own) in enumerate(zip(stored, weights, strict=True))
            if id(own) not in weights_left or id(model) not in models_left
        )

    def run_load_hooks(self, directory: str) -> frozenset[int]:
        """Call each ``hook(models, directory)``.

        Returns:
            Positions of the models that a hook removed from the list because it loaded them itself.
        """
        models = list(self.models)
        for hook in self.load_hooks.values():
            hook(models, directory)
        left = {id(item) for item in models}
        return frozenset(position for position, model in enumerate(self.stored.models) if id(model) not in left)


def add_hook(hooks: Hooks, hook: Callable[..., Any]) -> RemovableHandle:
    """Add ``hook`` to ``hooks``. The returned handle's ``remove()`` removes it again."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
