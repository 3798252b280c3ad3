"""State dicts and files for other programs, with the full tensors of models that may be sharded or wrapped."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcaccel.core.formatting import shortened
from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.distributed.device_mesh import is_dtensor
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.settings import Settings

__all__ = [
    "clean_state_dict_for_safetensors",
    "get_state_dict",
    "holds_shards",
    "meet_for_shards",
    "named_state",
    "open_safetensors",
    "save",
    "share_memory_with",
    "whole",
    "write_safetensors",
]


# -- gathering


def holds_shards(value: Any) -> bool:
    """Whether ``value`` contains a DTensor: in nested containers, or among the parameters of a module."""
    if isinstance(value, nn.Module):
        return any(is_dtensor(item) for item in value.parameters())
    if isinstance(value, Mapping):
        return any(holds_shards(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(holds_shards(item) for item in value)
    return is_dtensor(value)


def meet_for_shards(group: RankGroup, settings: Settings, kind: str) -> None:
    """Wait until all ranks have made the call ``kind``, before any of them blocks in a collective.

    Raises:
        RuntimeMisuse: some ranks have not made the call within the control timeout.
    """
    from hpcaccel.runtime.checkpointing import save_participants

    seconds = settings.control_timeout_seconds
    save_participants.attend(group, kind, needs_all=True, patience=seconds, limit=seconds)


def whole(tensor: torch.Tensor, *, keep: bool) -> torch.Tensor | None:
    """A DTensor's full tensor, copied to CPU memory; None if ``keep`` is false. Collective over the DTensor's ranks.

    Other tensors are returned unchanged.
    """
    if not is_dtensor(tensor):
        return tensor
    gathered: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return gathered.cpu() if keep else None


class Gatherer:
    """Gathers the DTensors in nested containers, one after the other. If ``keep`` is false, they become None.

    Tied tensors are gathered once per name, because not every rank can detect that they are tied. The gathered tensors
    are then tied again.
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


def get_state_dict(model: nn.Module, group: RankGroup, settings: Settings, *, unwrap: bool = True) -> dict[str, Any]:
    """The model's full state dict. If the model is sharded, all ranks must call this: rank 0 gets the state dict, with
    tensors in CPU memory, and the other ranks get an empty dict.

    Args:
        unwrap: whether to use the names of the script's own module, not those of the wrapped module.

    Raises:
        RuntimeMisuse: the model is sharded, and some ranks did not call this.
    """
    found = named_state(model, fetch=True) if unwrap else model.state_dict()
    if not holds_shards(found):
        return found
    meet_for_shards(group, settings, "get_state_dict()")
    gathered: dict[str, Any] = Gatherer(keep=group.is_main).nested(found)
    return gathered if group.is_main else {}


def named_state(model: nn.Module, *, keep_vars: bool = False, fetch: bool = False) -> dict[str, Any]:
    """The model's state dict, with the names of the script's own module.

    Args:
        fetch: whether tensors that are offloaded to CPU memory or disk are read. If not, they are on the meta device.
    """
    from hpcaccel.checkpoint.training_state import public_name
    from hpcaccel.runtime.offload.module_hooks import is_offloaded
    from hpcaccel.runtime.offload.offloaded_state import get_state_dict_offloaded_model

    if fetch and is_offloaded(model):
        state = get_state_dict_offloaded_model(model)
    else:
        state = model.state_dict(keep_vars=keep_vars)
    names = {key: public_name(model, key) for key in state}
    return state if all(key == name for key, name in names.items()) else {names[key]: state[key] for key in state}


# -- writing


def save(
    value: Any, file: Any, group: RankGroup, settings: Settings, *, safe: bool = False, on_each_node: bool = False
) -> None:
    """Write ``value`` on the main process. All ranks may call this; if ``value`` contains shards, all must.

    Args:
        file: a path, or a file object if ``safe`` is false. At a path, the file appears complete or not at all.
        safe: whether to write a safetensors file; ``value`` must then be a dict of tensors by name.
        on_each_node: whether to write on the first process of every node instead.

    Raises:
        RuntimeMisuse: ``value`` contains shards, and some ranks did not call this; ``value`` is a sharded module, or
            does not fit the format; safetensors is not installed.
    """
    writes = group.env.local_rank == 0 if on_each_node else group.is_main
    if holds_shards(value):
        if isinstance(value, nn.Module):
            raise RuntimeMisuse(
                f"save({type(value).__name__}): the model is sharded. Save its state dict: "
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
    """A function that writes ``value`` to a path, as a safetensors file.

    Raises:
        RuntimeMisuse: ``value`` is not a dict of tensors by name.
    """
    if not isinstance(value, Mapping):
        raise RuntimeMisuse(f"a safetensors file stores a dict of named tensors, not a {type(value).__name__}")
    wrong = [str(key) for key, item in value.items() if not (isinstance(key, str) and isinstance(item, torch.Tensor))]
    if wrong:
        raise RuntimeMisuse(
            f"a safetensors file stores only tensors under string keys, unlike these entries: {shortened(wrong, 5)}. "
            "Remove them, or save without safe_serialization"
        )
    return lambda path: write_safetensors(clean_state_dict_for_safetensors(value), path)


def write_safetensors(tensors: Mapping[str, torch.Tensor], path: Path, **metadata: str) -> None:
    """Write ``tensors`` and ``metadata`` to a safetensors file.

    Raises:
        RuntimeMisuse: safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise RuntimeMisuse(
            "writing safetensors files needs safetensors, which is not installed: pip install 'hpcaccel[train]', or "
            "pass safe_serialization=False"
        ) from error
    save_file(dict(tensors), str(path), metadata={"format": "pt", **metadata})


def open_safetensors(path: Path, device: str = "cpu") -> Any:
    """Open a safetensors file.

    Returns:
        A context manager that yields the open file, from which tensors are read one by one onto ``device``.

    Raises:
        CheckpointError: ``path`` cannot be read as a safetensors file, or safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"reading {path} needs safetensors, which is not installed: pip install 'hpcaccel[train]'"
        ) from error
    try:
        return safe_open(path, framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``. At the end of the block, sync the file written there, and rename it to
    ``path``."""
    from hpcaccel.core.durable_files import fsync_directory

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
    """A copy of ``state_dict`` that safetensors can store: it contains tied tensors only under their first name, copies
    of tensors whose memory overlaps, and only contiguous tensors."""
    kept: dict[str, Any] = {}
    storages: dict[int, list[torch.Tensor]] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            kept[name] = tensor
            continue
        if not _has_address(tensor):
            tensor = tensor.cpu()
        others = storages.setdefault(tensor.untyped_storage().data_ptr(), []) if tensor.numel() else []
        if any(share_memory_with(tensor, other) for other in others):
            continue
        kept[name] = tensor.clone().contiguous() if others else tensor.contiguous()
        others.append(tensor)
    return kept


def _has_address(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory has an address. On devices where it has none, such as XLA, tied tensors cannot be
    recognised, and are stored twice."""
    try:
        return not tensor.numel() or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:
        return False


def share_memory_with(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are tied: they have the same memory, shape, strides and dtype."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )
