"""Writing safetensors files one tensor at a time. See https://huggingface.co/docs/safetensors for the format."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcaccel.checkpoint.dcp_storage import raw_bytes
from hpcaccel.checkpoint.formats.weights import Weight
from hpcaccel.checkpoint.tree import dtype_name
from hpcaccel.checkpoint_files.safetensors_reader import CODES
from hpcaccel.checkpoint_files.weight_files import SAFE, index_text, share_out
from hpcaccel.core.run_dir import DIRECTORY_MODE, FILE_MODE, atomic_write, fsync_directory
from hpcaccel.errors import CheckpointError

__all__ = ["write_safetensors"]


def write_safetensors(
    target: Path, weights: Sequence[Weight], *, max_shard_bytes: int, wrote: Callable[[int], None]
) -> list[str]:
    """Write a model as the Hugging Face libraries read it; the names of the files.

    A tensor larger than ``max_shard_bytes`` gets a file alone. A tensor with several names is written once; its others
    stand in the file's metadata.

    Raises:
        CheckpointError: ``target`` is a file or holds a model already, or a dtype has no place in the format.
    """
    if target.is_file():
        raise CheckpointError(f"{target} is a file; safetensors files go into a directory")
    if target.is_dir() and (there := sorted(item.name for item in target.iterdir() if SAFE.owns(item.name))):
        raise CheckpointError(f"{target} holds a model already ({there[0]}); it is not overwritten")
    if odd := sorted({str(weight.dtype) for weight in weights if dtype_name(weight.dtype) not in CODES}):
        raise CheckpointError(f"safetensors files cannot hold {', '.join(odd)}: cast with --dtype, or use --to torch")
    is_new = not target.exists()
    target.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    plan = [[weights[at] for at in share] for share in share_out([one.bytes for one in weights], max_shard_bytes)]
    names = SAFE.names(len(plan))
    temporary = [target / f".{name}.{os.getpid()}.tmp" for name in names]
    try:
        for path, part in zip(temporary, plan, strict=True):
            _write_file(path, part, wrote)
        for path, name in zip(temporary, names, strict=True):
            os.replace(path, target / name)
    except BaseException:
        for path in temporary:
            path.unlink(missing_ok=True)
        if is_new:
            target.rmdir()
        raise
    if len(plan) > 1:
        places = {weight.name: name for name, part in zip(names, plan, strict=True) for weight in part}
        atomic_write(target / SAFE.index_name, index_text(places, sum(weight.bytes for weight in weights)))
        names = [*names, SAFE.index_name]
    fsync_directory(target)
    return names


def _write_file(path: Path, weights: Sequence[Weight], wrote: Callable[[int], None]) -> None:
    # The largest items first, as the library does it: so all tensors are aligned.
    ordered = sorted(weights, key=lambda weight: (-weight.dtype.itemsize, weight.name))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    with os.fdopen(fd, "wb") as file:
        file.write(_head(ordered))
        for weight in ordered:
            file.write(raw_bytes(weight.read()))
            wrote(weight.bytes)
        file.flush()
        os.fsync(file.fileno())


def _head(weights: Sequence[Weight]) -> bytes:
    ties = {tie: weight.name for weight in weights for tie in weight.ties}
    head: dict[str, object] = {"__metadata__": {"format": "pt", **ties}}
    at = 0
    for weight in weights:
        head[weight.name] = {
            "dtype": CODES[dtype_name(weight.dtype)],
            "shape": list(weight.shape),
            "data_offsets": [at, at + weight.bytes],
        }
        at += weight.bytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
