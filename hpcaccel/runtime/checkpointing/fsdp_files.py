"""The files of a sharded model or optimizer as Accelerate arranges them: writing, opening and merging.

``SHARDED_STATE_DICT`` is a directory of ``torch.distributed.checkpoint`` (DCP), such as ``pytorch_model_fsdp_0``, to
which every rank writes its shards. ``FULL_STATE_DICT`` is one ``torch.save`` file that rank 0 writes, such as
``pytorch_model_fsdp.bin``. Accelerate reads these files, and this module reads Accelerate's; no code in them is run.
"""

from __future__ import annotations

import glob
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from hpcaccel.checkpoint.formats import ConvertRequest, convert
from hpcaccel.checkpoint.formats.foreign import restricted
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint_files.dcp_reader import METADATA, is_dcp
from hpcaccel.checkpoint_files.weight_files import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from hpcaccel.core.durable_files import fsync_directory, make_folder
from hpcaccel.core.formatting import shortened
from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.checkpointing.export_model import Gatherer, meet_for_shards, replacing
from hpcaccel.runtime.checkpointing.stored_state import DcpState, MainState, RankFileState, StoredState, nested
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.settings import Settings

__all__ = ["FsdpFiles", "kind_of", "merge"]

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
_NUMBERS = {"1": FULL, "2": "LOCAL_STATE_DICT", "3": SHARDED}
"""torch's numbers of the types."""


def kind_of(plugin: Any) -> str:
    """The plugin's ``state_dict_type``, by name. If it is None, the variable ``FSDP_STATE_DICT_TYPE`` sets it; else it
    is SHARDED_STATE_DICT, and FULL_STATE_DICT for a plugin with ``fsdp_version=1``, as in Accelerate.

    Raises:
        RuntimeMisuse: the type is unknown, or LOCAL_STATE_DICT.
    """
    value = getattr(plugin, "state_dict_type", None) or os.environ.get("FSDP_STATE_DICT_TYPE")
    if value is None:
        return FULL if getattr(plugin, "fsdp_version", None) == 1 else SHARDED
    name = str(getattr(value, "name", value)).upper()
    name = _NUMBERS.get(name, name)
    if name not in (FULL, SHARDED):
        raise RuntimeMisuse(
            f"FullyShardedDataParallelPlugin: state_dict_type {value!r} is not supported by FSDP2 "
            f"(allowed: {FULL}, {SHARDED})"
        )
    return name


class FsdpFiles:
    """The files of one model or optimizer in a checkpoint's directory.

    Args:
        directory: the checkpoint's directory; for ``open``, also the DCP directory in it.
        stem: beginning of the files' names, such as ``optimizer``.
        index: number of the model or optimizer.
        kind: as ``kind_of``.
        use_dcp: if false, each rank has a file with its own shards instead of the DCP directory.
    """

    def __init__(self, directory: str | os.PathLike[str], stem: str, index: int, kind: str, *, use_dcp: bool) -> None:
        self._directory = Path(directory)
        self._numbered = f"{stem}_{index}"
        self._full = self._directory / (f"{stem}.bin" if index == 0 else f"{stem}_{index}.bin")
        self._what = "optimizer" if stem == "optimizer" else "model"
        self._kind = kind
        self._use_dcp = use_dcp
        self._group = World.current().group
        self._ranks = CheckpointRanks.of(self._group)

    def _of_rank(self) -> Path:
        return self._directory / f"{self._numbered}_rank{self._group.rank}.bin"

    def _remove_rank_files(self) -> None:
        """Remove the files of an earlier save, so that no rank finds shards of it beside new ones."""
        make_folder(self._directory)
        for old in self._directory.glob(f"{glob.escape(self._numbered)}_rank*.bin"):
            old.unlink()
        fsync_directory(self._directory)

    def save(self, key: str, content: dict[str, Any], settings: Settings) -> None:
        """Write a nested state dict, in a DCP directory under ``key``. All ranks call this.

        Raises:
            RuntimeMisuse: some ranks did not call this.
            CheckpointError: on all ranks, if the files cannot be written.
        """
        meet_for_shards(self._group, settings, f"save_fsdp_{self._what}()")
        if self._kind == FULL:
            whole = Gatherer(keep=self._group.is_main).nested(content)
            self._ranks.first(f"{self._full} cannot be written", lambda: _write(self._full, whole))
        elif not self._use_dcp:
            path = self._of_rank()
            self._ranks.first(f"{path} cannot be written", self._remove_rank_files)
            self._ranks.run(f"{path} cannot be written", lambda: _write(path, content))
        else:
            target = self._directory / self._numbered
            self._ranks.first(f"{target} cannot be written", lambda: _empty(target))
            _save_dcp(target, {key: content}, self._group)

    def open(self, settings: Settings) -> StoredState:
        """Open the files for reading. All ranks call this.

        Raises:
            RuntimeMisuse: some ranks did not call this.
            CheckpointError: on all ranks, if the files are missing or cannot be read.
        """
        meet_for_shards(self._group, settings, f"load_fsdp_{self._what}()")
        if self._kind == FULL:
            read = (lambda: _read(self._full)) if self._group.is_main else (lambda: {})
            content = self._ranks.run("the checkpoint cannot be loaded", read)
            return MainState(self._full, content if self._group.is_main else None, self._group)
        if not self._use_dcp:
            path = self._of_rank()
            return RankFileState(path, self._ranks.run("the checkpoint cannot be loaded", lambda: _read(path)))
        inside = self._directory.name == self._numbered
        path = self._directory if inside else self._directory / self._numbered
        return self._ranks.run("the checkpoint cannot be loaded", lambda: _open_dcp(path))


def _write(path: Path, value: Any) -> None:
    make_folder(path.parent)
    with replacing(path) as temporary:
        torch.save(value, temporary)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    found = restricted(path, lambda: torch.load(path, map_location="cpu", weights_only=True))
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} contains a {type(found).__name__} instead of a state dict")
    return found


def _empty(target: Path) -> None:
    """Create the directory. An earlier checkpoint in it ends here, because its data files are overwritten."""
    make_folder(target)
    (target / METADATA).unlink(missing_ok=True)
    fsync_directory(target)  # no crash may leave the metadata without its data
    for old in target.glob("__*.distcp"):
        old.unlink()


def _save_dcp(target: Path, state: dict[str, Any], group: RankGroup) -> None:
    import torch.distributed.checkpoint as dcp

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process may save, too
            dcp.save(state, storage_writer=dcp.FileSystemWriter(target), process_group=group.control)
    except dcp.api.CheckpointException as error:
        why = "; ".join(f"rank {rank}: {found[0]}" for rank, found in sorted(error.failures.items()))
        raise CheckpointError(f"{target} cannot be written: {why}") from error


def _open_dcp(path: Path) -> DcpState:
    if not is_dcp(path):
        raise CheckpointError(f"{path} {_why_no_dcp(path)}")
    return DcpState(path)


def _why_no_dcp(path: Path) -> str:
    if not path.is_dir():
        return "does not exist" if not path.exists() else "is not a directory"
    inner = sorted(one.name for one in path.iterdir() if one.is_dir() and is_dcp(one))
    advice = f" Give the path of one of its directories: {shortened(inner, 5)}" if inner else ""
    return f"is not a directory of torch.distributed.checkpoint: it has no {METADATA}.{advice}"


# -- merging


def merge(source: Path, target: Path, *, safe: bool, remove: bool) -> None:
    """Write the whole tensors of the DCP directory ``source`` to one file in ``target``, on rank 0.

    Args:
        safe: whether it is a safetensors file. If false, it is written by ``torch.save``.
        remove: whether to delete ``source`` afterwards.

    Raises:
        CheckpointError: on all ranks, if this is not possible.
    """

    def work() -> None:
        _merge(source, target, safe=safe)
        if remove:
            shutil.rmtree(source)

    group = World.current().group
    CheckpointRanks.of(group).first("the weights cannot be merged", work)


def _merge(source: Path, target: Path, *, safe: bool) -> None:
    state = _open_dcp(source)
    make_folder(target)
    name = SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME
    if any(len(way) > 1 for way in state.tensors):  # an optimizer's state
        if safe:
            raise CheckpointError(
                f"{source} contains an optimizer, and safetensors files store a model only. Pass "
                "safe_serialization=False"
            )
        _write(target / name, nested(state))
        return
    temporary = target / f".merging.{os.getpid()}.tmp"
    request = ConvertRequest(
        source=str(source),
        target=str(temporary if safe else temporary / name),
        to="safetensors" if safe else "torch",
        max_shard_bytes=2**63,
    )
    try:
        convert(request)
        os.replace(temporary / name, target / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    fsync_directory(target)
