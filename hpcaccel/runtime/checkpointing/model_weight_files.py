"""``save_model``: writes a model's weights to files with the names and the format of the Hugging Face libraries.

A single file is named ``model.safetensors``. Several files are named ``model-00001-of-00003.safetensors`` and so on,
with the index ``model.safetensors.index.json``. In torch's format the names begin with ``pytorch_model`` and end in
``.bin``. A sharded model is gathered file by file, so that rank 0 never has the tensors of several files in memory.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hpcaccel.checkpoint_files.weight_files import SAFE, TORCH, Form, index_text, share_out
from hpcaccel.core.durable_files import atomic_write, fsync_directory, make_folder
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.checkpointing.export_model import (
    clean_state_dict_for_safetensors,
    holds_shards,
    meet_for_shards,
    named_state,
    whole,
    write_safetensors,
)
from hpcaccel.runtime.compat.introspection import convert_file_size_to_int
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.settings import Settings

__all__ = ["SAFE", "TORCH", "save_model"]

PROGRESS_AFTER_SECONDS = 5.0
"""Minimum interval between two progress lines."""


class WeightEntry(NamedTuple):
    """A tensor with its first name. ``ties`` contains its other names, if it is tied."""

    name: str
    tensor: torch.Tensor
    ties: list[str]

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def save_model(
    model: nn.Module,
    directory: Path,
    group: RankGroup,
    settings: Settings,
    *,
    max_shard_size: int | str = "10GB",
    safe: bool = True,
) -> None:
    """Write the model's weights to ``directory``. Files from an earlier call in the same format are replaced.

    All ranks may call this; if the model is sharded, all must.

    Args:
        max_shard_size: maximum size of a file in bytes, or a string such as ``"10GB"``; a larger tensor gets its own
            file.
        safe: whether to write safetensors files. If false, the files are written by ``torch.save``.

    Raises:
        RuntimeMisuse: the model is sharded, and some ranks did not call this; the state dict contains an object that is
            not a tensor, or a tensor without values; ``directory`` is a file; ``max_shard_size`` is not a size;
            safetensors is not installed.
        CheckpointError: on all ranks, if a sharded model could not be written.
    """
    if directory.is_file():
        raise RuntimeMisuse(f"save_model({str(directory)!r}): this path is a file. Pass a directory")
    entries = _entries(model)
    shares = share_out([entry.bytes for entry in entries], convert_file_size_to_int(max_shard_size))
    plan = [[entries[position] for position in share] for share in shares]
    form = SAFE if safe else TORCH
    names = form.names(len(plan))
    sharded = holds_shards([entry.tensor for entry in entries])
    if sharded:
        meet_for_shards(group, settings, "save_model()")
    elif not group.is_main:
        return
    writer = _Writer(directory, sum(entry.bytes for entry in entries))
    run = _together(group) if sharded else _alone
    run(lambda: make_folder(directory))
    for name, part in zip(names, plan, strict=True):
        tensors = {entry.name: whole(entry.tensor.detach(), keep=group.is_main) for entry in part}
        run(lambda name=name, part=part, tensors=tensors: writer.write(name, part, tensors, safe=safe))
        del tensors
    run(lambda: writer.publish(form, dict(zip(names, plan, strict=True))))


def _alone(work: Any) -> None:
    work()


def _together(group: RankGroup) -> Any:
    """A function that runs work on rank 0. If the work fails, all ranks raise the error: otherwise the other ranks
    would wait in the next gather."""
    from hpcaccel.checkpoint.rank_agreement import CheckpointRanks

    ranks = CheckpointRanks.of(group)
    return lambda work: ranks.first("the model cannot be saved", work)


def _entries(model: nn.Module) -> list[WeightEntry]:
    """The model's parameters and persistent buffers, in order, each only once.

    Raises:
        RuntimeMisuse: a value is on the meta device, or is not a tensor.
    """
    found: dict[int, WeightEntry] = {}
    for name, value in named_state(model, keep_vars=True, fetch=True).items():
        if not isinstance(value, torch.Tensor):
            raise RuntimeMisuse(
                f"save_model() writes only tensors, but {name} has type {type(value).__name__}. Save the state dict "
                "with accelerator.save()"
            )
        if value.is_meta:
            raise RuntimeMisuse(
                f"save_model(): {name} is on the meta device and has no values to save. Load the model's weights "
                "first, for example with hpcaccel.load_sharded()"
            )
        if id(value) in found:
            found[id(value)].ties.append(name)
        else:
            found[id(value)] = WeightEntry(name, value, [])
    return list(found.values())


class _Writer:
    """Writes files under temporary names, and renames them when all of them are complete."""

    def __init__(self, directory: Path, total_bytes: int) -> None:
        self._directory = directory
        self._total_bytes = total_bytes
        self._bytes = 0
        self._began = self._printed = time.monotonic()

    def write(
        self, name: str, part: list[WeightEntry], tensors: Mapping[str, torch.Tensor | None], *, safe: bool
    ) -> None:
        kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        path = self._temporary(name)
        if safe:
            ties = {tie: entry.name for entry in part for tie in entry.ties}
            write_safetensors(clean_state_dict_for_safetensors(kept), path, **ties)
        else:
            torch.save(kept | {tie: kept[entry.name] for entry in part for tie in entry.ties}, path)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        self._bytes += sum(entry.bytes for entry in part)
        self._print_progress(name)

    def publish(self, form: Form, files: dict[str, list[WeightEntry]]) -> None:
        """Rename the files, write the index if there are several files, then remove the files of an earlier save."""
        for name in files:
            os.replace(self._temporary(name), self._directory / name)
        written = set(files)
        if len(files) > 1:
            places = {name: file for file, part in files.items() for entry in part for name in _names(entry, form)}
            atomic_write(self._directory / form.index_name, index_text(places, self._total_bytes))
            written.add(form.index_name)
        for path in list(self._directory.iterdir()):
            if form.owns(path.name) and path.name not in written:
                path.unlink()
        fsync_directory(self._directory)

    def _temporary(self, name: str) -> Path:
        return self._directory / f".{name}.tmp"

    def _print_progress(self, name: str) -> None:
        now = time.monotonic()
        if now - self._printed > PROGRESS_AFTER_SECONDS:
            self._printed = now
            done = f"{self._bytes / 1e9:.1f} of {self._total_bytes / 1e9:.1f} GB in {now - self._began:.0f} s"
            print(f"hpcaccel: saving the model: {name} written, {done}", file=sys.stderr, flush=True)


def _names(entry: WeightEntry, form: Form) -> list[str]:
    """The names under which files in the format ``form`` contain the tensor. Safetensors files have only the first."""
    return [entry.name] if form is SAFE else [entry.name, *entry.ties]
