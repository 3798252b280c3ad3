"""Accelerate's files of a training that is not sharded: ``save_accelerator_state`` and related functions.

The directory has a file for each object, such as ``model.safetensors``, ``optimizer.bin`` and ``random_states_0.pkl``.
Files are read with torch's restricted loader, which runs no code from them. A save first removes the files of an
earlier one, and writes the models last: a directory with a model is complete. ``Accelerator.save_state`` writes
hpcaccel's own checkpoints instead, which are committed at once and have checksums.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from hpcaccel.checkpoint_files.weight_files import MODEL_NAME, SAFE_MODEL_NAME
from hpcaccel.core.durable_files import fsync_directory, make_folder
from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.checkpointing.export_model import holds_shards, meet_for_shards, replacing
from hpcaccel.runtime.checkpointing.load_model import load_state_dict, load_values
from hpcaccel.runtime.compat.generator_states import generator_states, restore_generators
from hpcaccel.runtime.compat.introspection import get_pretty_name
from hpcaccel.runtime.compat.standalone import save, settings_in_use
from hpcaccel.runtime.data.loader import PreparedLoader
from hpcaccel.runtime.distributed.world import World

__all__ = [
    "OPTIMIZER_NAME",
    "PROFILE_PATTERN_NAME",
    "RNG_STATE_NAME",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "load_accelerator_state",
    "load_custom_state",
    "save_accelerator_state",
    "save_custom_state",
]

OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
PROFILE_PATTERN_NAME = "profile_{suffix}.json"
_LOADER_NAME = "dl_state_dict"
_KINDS = (
    r"(model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin)",
    r"optimizer(_\d+)?\.bin",
    r"scheduler(_\d+)?\.bin",
    r"(dl_state_dict|sampler)(_\d+)?\.bin",
    r"scaler\.pt",
)
"""Names of the files of models, optimizers, schedulers, loaders, and the gradient scaler."""
_GENERATORS = r"random_states_\d+\.pkl"

log = logging.getLogger(__name__)


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write states to Accelerate's files in ``output_dir``. All ranks call this: rank 0 writes all files but those of
    the random generators, which each rank writes. Files of an earlier save are removed first, of the same kinds of
    objects: without models and optimizers in the call, those that ``save_fsdp_model`` has written are kept.

    Args:
        model_states: the models' state dicts.
        dataloaders: the loaders; the position of each one that has a position, as prepared loaders have, is saved.
        process_index: this rank, for the name of its file.
        step: stored with the random generators.
        scaler: a gradient scaler, or None.
        save_on_each_node: whether the first rank of each node writes what rank 0 writes.
        safe_serialization: whether models are written to safetensors files. If not, ``torch.save`` writes them.

    Returns:
        ``output_dir``.

    Raises:
        RuntimeMisuse: an optimizer is sharded; some ranks did not call this.
        CheckpointError: on all ranks, if earlier files cannot be removed, or a file of random generators not written.
    """
    folder = Path(output_dir)
    states = [optimizer.state_dict() for optimizer in optimizers]
    for number, state in enumerate(states):
        if holds_shards(state):
            raise RuntimeMisuse(
                f"save_accelerator_state(): optimizer {number} is sharded. Save it with save_fsdp_optimizer(), and its "
                "model with save_fsdp_model()"
            )
    given = (model_states, optimizers, schedulers, dataloaders, [] if scaler is None else [scaler])
    # Models first: without its model, a directory is not loaded.
    kinds = [*(kind for kind, objects in zip(_KINDS, given, strict=True) if objects), _GENERATORS]
    group = World.current().group
    removes = group.env.local_rank == 0 if save_on_each_node else group.is_main
    _begin(folder, kinds if removes else (), _rng_file(folder, process_index), step)
    for number, state in enumerate(states):
        save(state, folder / _name(OPTIMIZER_NAME, number), save_on_each_node)
    for number, scheduler in enumerate(schedulers):
        save(scheduler.state_dict(), folder / _name(SCHEDULER_NAME, number), save_on_each_node)
    for number, loader in enumerate(dataloaders):
        if hasattr(loader, "state_dict"):
            save(loader.state_dict(), folder / _name(_LOADER_NAME, number), save_on_each_node)
    if scaler is not None:
        save(scaler.state_dict(), folder / SCALER_NAME, save_on_each_node)
    stem, suffix = (SAFE_MODEL_NAME, "safetensors") if safe_serialization else (MODEL_NAME, "bin")
    # The first model's file is the last one, because it is read first.
    for number, state in reversed(list(enumerate(model_states))):
        save(state, folder / _name(stem, number, suffix), save_on_each_node, safe_serialization)
    return folder


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any = None,
    map_location: str | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load states from files that ``save_accelerator_state``, here or in Accelerate, has written.

    Args:
        models: wrapped or plain models.
        map_location: where optimizer states are read to: ``cpu``, the default, or ``on_device``.
        load_kwargs: arguments of ``torch.load`` for optimizers, schedulers and loaders. ``weights_only=False`` runs
            code from the files.
        load_model_func_kwargs: ``strict``: whether missing and unexpected names are an error; default: True.

    Returns:
        A dict with ``step``, as it was saved; empty if this rank has no file of random generators.

    Raises:
        CheckpointError: a file is missing, or cannot be read; names or shapes differ.
        RuntimeMisuse: an argument has an unknown value.
    """
    if map_location not in (None, "cpu", "on_device"):
        raise RuntimeMisuse(
            f"load_accelerator_state(map_location={map_location!r}) is not valid (allowed: 'cpu', 'on_device')"
        )
    strict = load_model_func_kwargs.pop("strict", True)
    if load_model_func_kwargs:
        raise RuntimeMisuse(
            f"load_accelerator_state() has no argument {', '.join(load_model_func_kwargs)}: for models, only strict"
        )
    folder, options = Path(input_dir), dict(load_kwargs or {})
    where = World.current().group.device if map_location == "on_device" else torch.device("cpu")
    for number, model in enumerate(models):
        _load_model(folder, number, model, strict=strict)
    for number, optimizer in enumerate(optimizers):
        optimizer.load_state_dict(_read(folder / _name(OPTIMIZER_NAME, number), where, options))
    for number, scheduler in enumerate(schedulers):
        scheduler.load_state_dict(_read(folder / _name(SCHEDULER_NAME, number), None, options))
    for number, loader in enumerate(dataloaders):
        path = folder / _name(_LOADER_NAME, number)
        if hasattr(loader, "load_state_dict") and path.is_file():
            _load_position(loader, path, _read(path, None, options))
    if scaler is not None:
        scaler.load_state_dict(_read(folder / SCALER_NAME, None, {}))
    path = _rng_file(folder, process_index)
    if not path.is_file():
        log.info("%s does not exist: the random generators keep their state", path)
        return {}
    states = _read(path, None, {})
    restore_generators(path, states)
    return {"step": states["step"]} if "step" in states else {}


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write ``obj.state_dict()`` to ``custom_checkpoint_<index>.pkl`` in the directory ``path``, on the main process,
    or with ``save_on_each_node`` on the first process of each node."""
    make_folder(Path(path))
    save(obj.state_dict(), _custom_file(path, index), save_on_each_node)


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Load the file of ``save_custom_state`` into ``obj``.

    Raises:
        CheckpointError: there is no such file; or it contains objects other than tensors, numpy arrays and plain
            values. Accelerate unpickles any object, which may run code from the file.
    """
    file = _custom_file(path, index)
    log.info("loading the state of %s from %s", get_pretty_name(obj), file)
    obj.load_state_dict(_read(file, torch.device("cpu"), {}))


def _name(stem: str, number: int, suffix: str = "bin") -> str:
    return f"{stem}.{suffix}" if number == 0 else f"{stem}_{number}.{suffix}"


def _begin(folder: Path, kinds: Sequence[str], generators: Path, step: int) -> None:
    """Remove the files of an earlier save, on all ranks, and then write this rank's file of random generators."""
    from hpcaccel.checkpoint.rank_agreement import CheckpointRanks

    group = World.current().group
    meet_for_shards(group, settings_in_use(), "save_accelerator_state()")
    ranks = CheckpointRanks.of(group)
    ranks.run(f"{folder} cannot be prepared", lambda: _prepare(folder, kinds))
    ranks.run(f"{generators} cannot be written", lambda: _write_generators(generators, step))


def _prepare(folder: Path, kinds: Sequence[str]) -> None:
    """Create the directory, and remove the files of an earlier save whose names match one of ``kinds``, in order."""
    make_folder(folder)
    names = [path.name for path in folder.iterdir()]
    for kind in kinds:
        for name in names:
            if re.fullmatch(kind, name):
                (folder / name).unlink()
    fsync_directory(folder)


def _write_generators(path: Path, step: int) -> None:
    with replacing(path) as temporary:
        torch.save({"step": step, **generator_states()}, temporary)


def _custom_file(path: str | os.PathLike[str], index: int) -> Path:
    return Path(path) / f"custom_checkpoint_{index}.pkl"


def _rng_file(folder: Path, process_index: int) -> Path:
    return folder / f"{RNG_STATE_NAME}_{process_index}.pkl"


def _read(path: Path, where: torch.device | None, options: Mapping[str, Any]) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    from hpcaccel.checkpoint.formats.foreign import restricted

    options = {"weights_only": True, **options}
    try:
        with _numpy_arrays():
            return restricted(path, lambda: torch.load(path, map_location=where, **options))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. If you trust the file, allow the classes in it with torch.serialization.add_safe_globals"
        ) from error


def _numpy_arrays() -> AbstractContextManager[Any]:
    """Let torch's restricted loader read numpy arrays, which describe the state of numpy's generator."""
    import numpy as np

    make: Any = np.empty(0).__reduce__()[0]
    named = [(make, f"numpy.{module}.multiarray._reconstruct") for module in ("core", "_core")]
    kinds = [type(np.dtype(kind)) for kind in ("uint32", "int32", "uint64", "int64", "float32", "float64", "bool")]
    return torch.serialization.safe_globals([*named, np.ndarray, np.dtype, *kinds])


def _load_model(folder: Path, number: int, model: Any, *, strict: bool) -> None:
    from hpcaccel.checkpoint.formats.weights import plain_names

    path = folder / _name(SAFE_MODEL_NAME, number, "safetensors")
    path = path if path.is_file() else folder / _name(MODEL_NAME, number)
    found = load_state_dict(path)
    names = plain_names(found)
    load_values(model, ((names[name], value) for name, value in found.items()), path, strict=strict)


def _load_position(loader: Any, path: Path, state: Any) -> None:
    if isinstance(loader, PreparedLoader) and not (isinstance(state, dict) and "reading" in state):
        raise CheckpointError(
            f"{path} has the position of another kind of loader, not of one that Accelerator.prepare() has made. "
            "Delete the file to begin with the epoch's first batch"
        )
    loader.load_state_dict(state)
