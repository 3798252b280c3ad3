"""The tensors of a model, from headers of weight files, a checkpoint, a config.json or a Python function.

No weights are read, and none are allocated.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files.contents import Contents, item_bytes
from hpcaccel.checkpoint_files.weight_files import DTYPES, SAFE, read_head
from hpcaccel.errors import CheckpointError, UserError
from hpcaccel.launch.rank_program import RankProgramFailed, run_rank_program

__all__ = ["Architecture", "ModelSize", "ModelTensor", "model_of"]

_BUFFER = re.compile(r"(?:^|\.)(?:running_mean|running_var|num_batches_tracked|(?:original_)?inv_freq|position_ids)$")
"""Names of buffers in common modules."""
_BLOCK = re.compile(r"(?P<block>(?:.*?\.)?\d+)\.")
"""The name of a repeated block ends in the first number of a tensor's name."""
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
CONFIG = "config.json"


@dataclass(frozen=True)
class ModelTensor:
    """A parameter or buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = "trained"
    """``trained``, ``frozen`` or ``buffer``."""

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))

    @property
    def stored_bytes(self) -> int:
        return self.count * item_bytes(self.dtype)


@dataclass(frozen=True)
class Architecture:
    """The sizes of a transformer that its activations depend on."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    longest_sequence: int | None
    """Maximum number of tokens; None if unknown."""


@dataclass(frozen=True)
class ModelSize:
    """The tensors of a model."""

    source: str
    tensors: tuple[ModelTensor, ...]
    architecture: Architecture | None = None
    """None: it is not a transformer, or unknown."""
    why_unknown: str = ""
    """Why ``architecture`` is None."""
    notes: tuple[str, ...] = field(default=())

    @property
    def parameters(self) -> int:
        return sum(one.count for one in self.tensors if one.kind != "buffer")

    @property
    def trained(self) -> int:
        return sum(one.count for one in self.tensors if one.kind == "trained")

    def blocks(self) -> dict[str, int]:
        """Number of parameters of each repeated block, such as ``model.layers.0``; those outside under ``""``."""
        found: dict[str, int] = {"": 0}
        for one in self.tensors:
            if one.kind != "buffer":
                match = _BLOCK.match(one.name)
                block = match["block"] if match else ""
                found[block] = found.get(block, 0) + one.count
        return found


def model_of(source: str, *, python: str = sys.executable) -> ModelSize:
    """The size of the model that ``source`` names.

    Args:
        source: a safetensors file, a folder of such files or with a ``config.json``, a ``config.json``, a checkpoint
            of hpcaccel, or ``module:function``.
        python: the Python that has torch, and transformers for a ``config.json``.

    Raises:
        UserError: there is no such source, or the model cannot be built.
        Damaged: a file is damaged.
    """
    path = Path(source).expanduser()
    if not path.exists():
        if _FACTORY.fullmatch(source):
            return _built("factory", source, source, python)
        raise UserError(
            f"{source!r} is not a model: give a safetensors file or folder, a config.json, a checkpoint, a job spec, "
            "or a Python function as module:function"
        )
    if path.is_dir() and (path / checkpoint_files.MANIFEST).exists():
        return _from_checkpoint(path)
    files = _weight_files(path) if path.is_dir() else [path] if path.suffix == SAFE.suffix else []
    if files:
        return _from_files(source, files)
    config = path / CONFIG if path.is_dir() else path
    if config.suffix == ".json" and config.is_file():
        return _built("config", str(config), source, python)
    inside = f"{path} has neither *.safetensors nor {CONFIG}" if path.is_dir() else f"{path} is no model"
    raise UserError(f"{inside}: give a safetensors file or folder, a config.json, a checkpoint or a job spec")


def _weight_files(folder: Path) -> list[Path]:
    """The files with the model: those of the index, else the single file. Folders may have further copies of it."""
    index = folder / SAFE.index_name
    if index.is_file():
        return sorted({folder / str(name) for name in (_json(index).get("weight_map") or {}).values()})
    single = folder / SAFE.single
    return [single] if single.is_file() else sorted(folder.glob(f"*{SAFE.suffix}"))


def _from_files(source: str, files: list[Path]) -> ModelSize:
    tensors: dict[str, ModelTensor] = {}
    for file in files:
        for name, tensor in read_head(file).tensors.items():
            tensors[name] = _stored(name, tensor.shape, DTYPES.get(tensor.dtype, tensor.dtype))
    config = files[0].parent / CONFIG
    values = _json(config) if config.is_file() else None
    why = f"there is no {CONFIG} beside the weights" if values is None else ""
    return _sized(source, tuple(tensors.values()), values, why)


def _from_checkpoint(path: Path) -> ModelSize:
    contents = Contents(path)
    tensors = []
    for key, tensor in contents.tensors.items():
        match = re.match(r"models\.(\d+)\.(.+)", key)
        if match:
            tensors.append(_stored(f"{match[1]}.{match[2]}", tensor.shape, tensor.dtype))
    if not tensors:
        raise CheckpointError(f"{path} contains no model: give a checkpoint or weight files of a model")
    only = all(one.name.startswith("0.") for one in tensors)
    named = [ModelTensor(one.name[2:], one.shape, one.dtype, one.kind) for one in tensors] if only else tensors
    return _sized(str(path), tuple(named), None, "a checkpoint does not contain the model's configuration")


def _stored(name: str, shape: tuple[int, ...], dtype: str) -> ModelTensor:
    """A tensor of a file, in which parameters and buffers look alike: names and integers tell buffers."""
    floating = dtype.startswith(("float", "bfloat"))
    return ModelTensor(name, shape, dtype, "buffer" if _BUFFER.search(name) or not floating else "trained")


def _built(kind: str, place: str, source: str, python: str) -> ModelSize:
    config = _json(Path(place)) if kind == "config" else None
    try:
        found = run_rank_program("parameter_program.py", [kind, place], python=python, timeout_seconds=600)
    except RankProgramFailed as error:
        raise UserError(f"{source}: {error}") from None
    tensors = tuple(ModelTensor(name, tuple(shape), dtype, kind) for name, shape, dtype, kind in found["tensors"])
    return _sized(source, tensors, config or found["config"], f"{found['class']} has no attribute `config`")


def _sized(source: str, tensors: tuple[ModelTensor, ...], config: Any, why: str) -> ModelSize:
    notes = []
    packed = sum(one.stored_bytes for one in tensors if one.kind == "buffer" and not one.is_float)
    if packed > sum(one.stored_bytes for one in tensors) / 4:
        notes.append("many tensors are integers: quantised weights count as they are stored, and are not trained")
    architecture, reason = (None, why) if config is None else _architecture(config)
    return ModelSize(source, tensors, architecture, reason, tuple(notes))


_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "embed_dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocabulary": ("vocab_size", "n_vocab", "vocabulary_size"),
    "longest_sequence": ("max_position_embeddings", "n_positions", "n_ctx", "block_size", "max_seq_len"),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _architecture(config: Any) -> tuple[Architecture | None, str]:
    """The sizes in a configuration, in the spellings of transformers and of common programs; or why there are none."""
    values = config.get("text_config") or config if isinstance(config, dict) else {}
    found = {
        name: next((values[key] for key in keys if isinstance(values.get(key), int)), None)
        for name, keys in _NAMES.items()
    }
    if any((values.get(key) or 0) > 1 for key in _EXPERTS if isinstance(values.get(key), int)):
        return None, "the formula holds for dense models, and this one is a mixture of experts"
    if any(not found[name] for name in ("layers", "hidden", "heads")):
        return None, "the model's configuration does not describe a transformer"
    return Architecture(**{**found, "vocabulary": found["vocabulary"] or 0}), ""  # type: ignore[arg-type]


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a configuration: it must be a JSON object")
    return values
