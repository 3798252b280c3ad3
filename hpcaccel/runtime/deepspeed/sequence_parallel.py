"""DeepSpeed's sequence parallelism (Ulysses): ranks split the sequences, and exchange heads for tokens in attention.

DeepSpeed replaces the attention of transformers' models, and its loader adapter divides each batch among the ranks of a
group: each rank reads a batch of its own, and the group trains on all of them, one after the other.
"""

from __future__ import annotations

import atexit
import inspect
import weakref
from importlib import import_module
from typing import Any

import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallelism_config import DeepSpeedSequenceParallelConfig

__all__ = ["adapt_loader", "replace_attention"]

_ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"
_GROUPS = "deepspeed.runtime.sequence_parallel.parallel_state_sp"
_NOT_SPLIT = ("eager", "flex_attention", "paged|eager")
"""Attention that materialises a mask, which no rank has as a whole."""

_replaced = False
"""Whether this process has replaced attention. DeepSpeed cannot do it twice."""


def replace_attention(model: nn.Module, config: Any, *, samples: int) -> Any:
    """Let DeepSpeed split the sequences of a model; a collective call. ``deepspeed.initialize`` must follow.

    Args:
        config: the ``ParallelismConfig``.
        samples: number of samples of a micro-batch.

    Returns:
        DeepSpeed's groups, the argument ``mpu`` of ``deepspeed.initialize``.

    Raises:
        RuntimeMisuse: the model is not one of transformers, its attention cannot be split, another model's has been
            replaced before, or DeepSpeed is too old.
    """
    global _replaced
    handler = config.sp_handler or DeepSpeedSequenceParallelConfig()
    implementation = _implementation(model, config.sp_size, handler.sp_attn_implementation)
    if _replaced:
        raise RuntimeMisuse(
            "this process has already prepared a model with sp_size above 1, and DeepSpeed forms its groups only once. "
            "Start another program for another model"
        )
    attention = _library().UlyssesSPAttentionHF
    _replaced = True
    # DeepSpeed adopts the process group; otherwise deepspeed.initialize() does this, which is too late for its groups.
    import_module("deepspeed").init_distributed(auto_mpi_discovery=False)
    register = attention.register_with_transformers
    # An argument that not every release has. HF Trainer evaluates with whole sequences.
    in_eval = {"disable_in_eval": True} if "disable_in_eval" in inspect.signature(register).parameters else {}
    return register(
        model_name_or_path=model,
        core_attn_implementation=implementation,
        sequence_parallel_size=config.sp_size,
        micro_batch_size=samples,
        seq_length=handler.sp_seq_length,
        seq_length_is_variable=handler.sp_seq_length_is_variable,
        **in_eval,
    )


def _implementation(model: nn.Module, size: int, given: str | None) -> str:
    """Name of the attention to replace.

    Raises:
        RuntimeMisuse: see ``replace_attention``.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise RuntimeMisuse(
            f"sp_size={size} needs a model of transformers, because DeepSpeed replaces its attention, and "
            f"{type(model).__name__} has no config of transformers. Use cp_size with strategy fsdp for other models"
        )
    own = getattr(config.get_text_config(), "_attn_implementation", None)
    if own in _NOT_SPLIT or (given is not None and own is not None and given != own):
        raise RuntimeMisuse(
            f"sp_size={size}: this {type(model).__name__} has attn_implementation={own!r}, and "
            f"sp_attn_implementation is {given!r}. Load it with from_pretrained(..., attn_implementation="
            f"{given or 'flash_attention_2'!r}), or 'sdpa' in both places where there is no flash attention"
        )
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    if recurrent := sorted({kind for kind in kinds if "linear_attention" in kind}):
        raise RuntimeMisuse(
            f"sp_size={size}: {type(model).__name__} has layers of kind {', '.join(recurrent)}, whose state runs along "
            "the sequence. DeepSpeed does not split them. Set sp_size to 1"
        )
    return given or own or "sdpa"


def adapt_loader(loader: Any, device: torch.device) -> Any:
    """DeepSpeed's adapter of a prepared loader: for each batch that each rank of a group has read, this rank's part of
    its sequences. The batches are dicts with ``input_ids``, ``position_ids`` and ``labels`` of shape (samples, tokens);
    the adapter replaces ``labels`` by ``shift_labels``.

    Raises:
        RuntimeMisuse: no model has been prepared, so there are no groups yet; or DeepSpeed is too old.
    """
    adapter = _library().UlyssesSPDataLoaderAdapter
    if not _replaced:
        raise RuntimeMisuse("deepspeed_ulysses_dl_adapter() needs DeepSpeed's groups: prepare the model first")
    groups = import_module(_GROUPS)
    adapted = adapter(
        loader,
        sp_rank=groups.get_sequence_parallel_rank(),
        sp_group=groups.get_sequence_parallel_group(),
        sp_world_size=groups.get_sequence_parallel_world_size(),
        device=device,
    )
    atexit.register(_leave, weakref.ref(adapted))
    return adapted


def _leave(adapter: Any) -> None:
    """End the iteration that the adapter always has; the interpreter's own end is too late for a prepared loader."""
    if (adapted := adapter()) is not None:
        adapted.iter = iter(())


def _library() -> Any:
    try:
        return import_module(_ULYSSES)
    except ImportError as error:
        raise RuntimeMisuse(
            f"sequence parallelism (sp_size) needs deepspeed>=0.18.2, transformers and einops: {error}. "
            "pip install --upgrade deepspeed transformers einops"
        ) from error
