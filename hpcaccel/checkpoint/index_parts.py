"""Reading of an index in parts (see ``block_files``): a rank reads those that contain what it loads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpcaccel.checkpoint.manifest_writer import Index
from hpcaccel.checkpoint_files import manifest
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["IndexParts", "IndexSource", "lacking", "read_whole"]


def read_whole(path: Path) -> Index:
    """The index of the checkpoint ``path`` with all of its parts.

    Raises:
        Damaged: the manifest, a file's size or a part of the index differs from the committed one.
        CheckpointError: a newer hpcaccel wrote the checkpoint.
    """
    content = manifest.read(path)
    first, *parts = (manifest.read_listed(path, content["files"], name) for name in manifest.index_names(content))
    index = Index.from_json(first)
    for part in parts:
        index.add(part)
    return index


class IndexSource(Protocol):
    """Adds parts to an index, as a rank needs them."""

    def read_of_rank(self, rank: int | None) -> None:
        """Add the part with what ``rank`` has saved; nothing for None."""

    def read_missing(self, tensors: Mapping[str, torch.Tensor], plan: LoadPlan) -> bool:
        """Add parts with those tensors that ``plan`` does not cover. Returns whether anything was added."""


class IndexParts:
    """The parts of a checkpoint's index. What is read is added to ``index``.

    Args:
        content: the checkpoint's manifest, which has several blocks.
        index: the content of ``index.json``.
    """

    def __init__(self, path: Path, content: Mapping[str, Any], index: Index) -> None:
        self._path = path
        self._content = content
        self._index = index
        self._blocks = sorted(content["blocks"])
        self._unread = set(self._blocks)
        self._ranges: dict[str, dict[str, Any]] | None = None
        self._beside: dict[str, list[str]] = {}
        """For each block that was read, the blocks that have saved chunks of its ranks."""

    def check_files(self, rank: int, ranks: int) -> None:
        """Check the sizes of the files of every ``ranks``-th block, from number ``rank`` on.

        Raises:
            Damaged: a file is missing or has another size than the committed one.
        """
        for name in self._blocks[rank::ranks]:
            files = manifest.read_block(self._path, self._content, name)
            for problem in manifest.wrong_sizes(self._path, {"files": files}):
                raise Damaged(problem)

    def read_of_rank(self, rank: int | None) -> None:
        """Read the parts of the block of ``rank``, a rank of the save, and of those beside it; nothing for None.

        Raises:
            Damaged: the part is missing or damaged.
        """
        if rank is not None:
            name = self._blocks[rank // int(self._content["block_ranks"])]
            self._read([name])
            self._read(self._beside.get(name, ()))

    def read_missing(self, tensors: Mapping[str, torch.Tensor], plan: LoadPlan) -> bool:
        """Read the parts of those tensors that ``plan``, which was made from the index as it is, does not cover.

        Returns:
            Whether anything was read, so that a new plan is needed.

        Raises:
            Damaged: a part is missing or damaged.
            CheckpointError: the whole index does not have what this rank loads of a tensor.
        """
        missing = lacking(tensors, plan)
        if not missing:
            return False
        if self._read(name for key in missing for name in self._overlapping(key, tensors[key])):
            return True
        # A strided shard is not a box: read all parts with this tensor.
        if self._read(name for key in missing for name in self._ranges_of(key)):
            return True
        raise CheckpointError(f"{self._path} does not have all chunks of {missing[0]} that this rank loads")

    def _overlapping(self, key: str, tensor: torch.Tensor) -> Iterable[str]:
        """The blocks whose chunks may overlap this rank's part of a tensor."""
        begins: tuple[int, ...] = (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            _, begins = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        ends = [begin + size for begin, size in zip(begins, _local(tensor).shape, strict=True)]
        for name, bounds in self._ranges_of(key).items():
            if all(a < end and begin < b for (a, b), begin, end in zip(bounds, begins, ends, strict=True)):
                yield name

    def _ranges_of(self, key: str) -> dict[str, Any]:
        if self._ranges is None:
            text = manifest.read_listed(self._path, self._content["files"], manifest.RANGES)
            self._ranges = dict(json.loads(text)["ranges"])
        return dict(self._ranges.get(key, {}))

    def _read(self, names: Iterable[str]) -> bool:
        """Add the parts of these blocks to the index. Returns whether there was any that is not in it yet."""
        found = sorted(self._unread.intersection(names))
        for name in found:
            table = manifest.read_block_table(self._path, self._content, name)
            self._beside[name] = list(table.get("beside", ()))
            self._index.add(manifest.read_listed(self._path, table["files"], f"{name}/{manifest.INDEX}"))
            self._unread.discard(name)
        return bool(found)


def lacking(tensors: Mapping[str, torch.Tensor], plan: LoadPlan) -> list[str]:
    """The keys of those tensors of which ``plan`` does not cover this rank's part."""
    covered = dict.fromkeys(tensors, 0)
    for item in plan.items:
        covered[item.dest_index.fqn] += math.prod(item.lengths)
    return [key for key, tensor in tensors.items() if covered[key] < _local(tensor).numel()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
