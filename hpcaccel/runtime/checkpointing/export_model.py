"""Files that any program opens: whole, plain tensors, whatever the model is sharded over or wrapped in."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.process_group import Group
from hpcaccel.runtime.parallel.dtensors import is_dtensor
from hpcaccel.runtime.settings import Settings

__all__ = [
    "clean_state_dict_for_safetensors",
    "get_state_dict",
    "holds_shards",
    "meet_for_shards",
    "save",
    "share_memory_with",
    "write_safetensors",
]


# -- gathering


def holds_shards(value: Any) -> bool:
    """Whether a DTensor is anywhere in nested containers, or among the parameters of a module."""
    if isinstance(value, nn.Module):
        return any(is_dtensor(item) for item in value.parameters())
    if isinstance(value, Mapping):
        return any(holds_shards(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(holds_shards(item) for item in value)
    return is_dtensor(value)


def meet_for_shards(group: Group, settings: Settings, kind: str) -> None:
    """Make sure that all ranks have come to gather, before any of them waits for the others in a collective.

    Raises:
        RuntimeMisuse: some have not, within the control timeout.
    """
    from hpcaccel.runtime.checkpointing import save_participants

    seconds = settings.control_timeout_seconds
    save_participants.attend(group, kind, needs_all=True, patience=seconds, limit=seconds)


def whole(tensor: torch.Tensor, *, keep: bool) -> torch.Tensor | None:
    """A DTensor gathered into the memory of the CPU; all its ranks call, and those that do not ``keep`` it get None.
    Any other tensor comes back as it is."""
    if not is_dtensor(tensor):
        return tensor
    gathered: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return gathered.cpu() if keep else None


class Gatherer:
    """Nested containers with every DTensor gathered, one after the other; what is not kept is None.

    All ranks gather tied tensors as often as they have names, for not every rank can tell that they are tied; where
    they are kept, they are one tensor again.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._gathered: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def nested(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, Mapping):
            items = [(key, self.nested(item)) for key, item in value.items()]
            return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.nested(item) for item in value))
        if isinstance(value, list | tuple):
            return type(value)(self.nested(item) for item in value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor | None:
        found = whole(tensor, keep=self._keep)
        if found is None or found is tensor:
            return found
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        twins = self._gathered.setdefault(local.data_ptr(), [])
        tied = next((item for other, item in twins if local.numel() and share_memory_with(local, other)), None)
        twins.append((local, found))
        return found if tied is None else tied


def get_state_dict(model: nn.Module, group: Group, settings: Settings, *, unwrap: bool = True) -> dict[str, Any]:
    """The model's whole state dict. Of a sharded model, for which all ranks must call, rank 0 gets it in the memory of
    the CPU, and the others an empty one.

    Args:
        unwrap: names as the script's own module has them; False: as the wrapped one has them.

    Raises:
        RuntimeMisuse: some ranks did not call, and the model is sharded.
    """
    found = named_state(model) if unwrap else model.state_dict()
    if not holds_shards(found):
        return found
    meet_for_shards(group, settings, "get_state_dict()")
    gathered: dict[str, Any] = Gatherer(keep=group.is_main).nested(found)
    return gathered if group.is_main else {}


def named_state(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """A state dict under the names that the script's own module has."""
    from hpcaccel.checkpoint.parameter_names import public_name

    state = model.state_dict(keep_vars=keep_vars)
    names = {key: public_name(model, key) for key in state}
    return state if all(key == name for key, name in names.items()) else {names[key]: state[key] for key in state}


# -- writing


def save(
    value: Any, file: Any, group: Group, settings: Settings, *, safe: bool = False, on_each_node: bool = False
) -> None:
    """Write ``value`` on the main process. All ranks may call; where it holds shards, all must.

    Args:
        file: a path, whose file appears whole or not at all, or an object to write to.
        safe: as safetensors; then ``value`` is a dict of tensors by name.
        on_each_node: on the first process of every node.

    Raises:
        RuntimeMisuse: some ranks did not call, and there are shards; or it cannot be written in that form.
    """
    writes = group.env.local_rank == 0 if on_each_node else group.is_main
    if holds_shards(value):
        if isinstance(value, nn.Module):
            raise RuntimeMisuse(
                f"save({type(value).__name__}): the model is sharded. Save its state: "
                "accelerator.save(accelerator.unwrap_model(model).state_dict(), path)"
            )
        meet_for_shards(group, settings, "save()")
        value = Gatherer(keep=writes).nested(value)
    if not writes:
        return
    if safe:
        write = _safetensors_writer(value)
    elif hasattr(file, "write"):
        torch.save(value, file)
        return
    else:

        def write(path: Path) -> None:
            torch.save(value, path)

    with replacing(Path(file)) as temporary:
        write(temporary)


def _safetensors_writer(value: Any) -> Callable[[Path], None]:
    """
    Raises:
        RuntimeMisuse: it is not a dict of tensors by name.
    """
    if not isinstance(value, Mapping):
        raise RuntimeMisuse(f"safetensors files hold tensors by name, not a {type(value).__name__}")
    wrong = [str(key) for key, item in value.items() if not (isinstance(key, str) and isinstance(item, torch.Tensor))]
    if wrong:
        raise RuntimeMisuse(
            f"safetensors files hold tensors by name; these entries are something else: {', '.join(wrong[:5])}. "
            "Leave them out, or save without safe_serialization"
        )
    return lambda path: write_safetensors(clean_state_dict_for_safetensors(value), path)


def write_safetensors(tensors: Mapping[str, torch.Tensor], path: Path, **metadata: str) -> None:
    """
    Raises:
        RuntimeMisuse: safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise RuntimeMisuse(
            f"writing {path.name} needs safetensors, which is not installed: pip install 'hpcaccel[train]', or pass "
            "safe_serialization=False"
        ) from error
    save_file(dict(tensors), str(path), metadata={"format": "pt", **metadata})


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, which becomes ``path`` at the end, when all of it is on the disk."""
    from hpcaccel.core.run_dir import fsync_directory

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


# -- tied tensors


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what safetensors cannot hold: of tensors that are one in memory the first name stays, those that
    overlap otherwise become copies, and all lie in one piece. The dict that was given stays as it is."""
    kept: dict[str, Any] = {}
    storages: dict[int, list[torch.Tensor]] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            kept[name] = tensor
            continue
        others = storages.setdefault(tensor.untyped_storage().data_ptr(), []) if tensor.numel() else []
        if any(share_memory_with(tensor, other) for other in others):
            continue
        kept[name] = tensor.clone().contiguous() if others else tensor.contiguous()
        others.append(tensor)
    return kept


def share_memory_with(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same one under two names."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )
