"""From the words of ``Accelerator(...)`` to settings: plain ones, and those that plugins and handlers hold."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from hpcaccel.errors import RuntimeMisuse

__all__ = ["OWN_HANDLERS", "SUCCESSORS", "handlers_by_name", "refuse_unknown", "words"]

HANDLERS = {
    "AutocastKwargs": "autocast",
    "DistributedDataParallelKwargs": "ddp",
    "GradScalerKwargs": "scaler",
    "InitProcessGroupKwargs": "init_process_group",
    "ProfileKwargs": "profile",
    "AORecipeKwargs": "fp8",
    "TERecipeKwargs": "fp8",
    "MSAMPRecipeKwargs": "fp8",
    "FP8RecipeKwargs": "fp8",
}
PLUGINS = ("fsdp", "tensor_parallel", "parallelism", "dynamo", "tp_plan")
OWN_HANDLERS = ("autocast", "ddp", "profile", "dynamo", "tp_plan")
"""Those that concern what one Accelerator prepares; the process shares the others."""

SUCCESSORS = {
    "logging_dir": "project_dir, or project_config=ProjectConfiguration(logging_dir=...)",
    "fp16": 'mixed_precision="fp16"',
    "downcast_bf16": 'mixed_precision="bf16"',
    "use_seedable_sampler": "dataloader_config=DataLoaderConfiguration(use_seedable_sampler=...)",
    "use_stateful_dataloader": "dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=...)",
    "data_seed": "dataloader_config=DataLoaderConfiguration(data_seed=...)",
    "non_blocking": "dataloader_config=DataLoaderConfiguration(non_blocking=...)",
    "find_unused_parameters": "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=...)]",
    "timeout": "kwargs_handlers=[InitProcessGroupKwargs(timeout=...)]",
    "num_processes": "slurm.nodes and slurm.gpus_per_node of the spec",
}
ELSEWHERE = {
    "deepspeed_plugin": 'DeepSpeed is not here: strategy="fsdp" shards parameters, gradients and optimizer state',
    "deepspeed_plugins": 'DeepSpeed is not here: strategy="fsdp" shards parameters, gradients and optimizer state',
    "megatron_lm_plugin": 'Megatron-LM is not here: strategy="fsdp" and ParallelismConfig(tp_size=...) shard models',
}


def refuse_unknown(unknown: Mapping[str, Any], known: list[str]) -> None:
    """
    Raises:
        RuntimeMisuse: a keyword that does not exist; its successor is named.
    """
    for name, value in unknown.items():
        if name in ELSEWHERE:
            if value is None:
                continue
            raise RuntimeMisuse(f"Accelerator({name}=...): {ELSEWHERE[name]}")
        hint = f"It is called {SUCCESSORS[name]} now" if name in SUCCESSORS else f"Known are: {', '.join(known)}"
        raise RuntimeMisuse(f"Accelerator({name}={value!r}): there is no such keyword. {hint}")


def handlers_by_name(kwargs_handlers: list[Any] | None, **plugins: Any) -> SimpleNamespace:
    """Each handler under the name of what it sets, None where there is none.

    Raises:
        RuntimeMisuse: something that is no handler, or two for the same thing.
    """
    found: dict[str, Any] = {**dict.fromkeys(HANDLERS.values()), **dict.fromkeys(PLUGINS), **plugins}
    for handler in kwargs_handlers or []:
        name = next((HANDLERS[kind.__name__] for kind in type(handler).__mro__ if kind.__name__ in HANDLERS), None)
        if name is None:
            raise RuntimeMisuse(f"kwargs_handlers holds {handler!r}, which is none of {', '.join(sorted(HANDLERS))}")
        if found[name] is not None:
            raise RuntimeMisuse(f"kwargs_handlers holds two handlers for {name}: {found[name]!r} and {handler!r}")
        found[name] = handler
    return SimpleNamespace(**found)


def words(
    plain: Mapping[str, Any],
    *,
    dataloader_config: Any = None,
    gradient_accumulation_plugin: Any = None,
    fsdp_plugin: Any = None,
    parallelism_config: Any = None,
) -> dict[str, Any]:
    """Settings by name; None was not given. A plugin wins over a plain word that says nothing."""
    given = {name: _text(value) for name, value in plain.items()}
    if dataloader_config is not None:
        for name in (
            "split_batches",
            "dispatch_batches",
            "even_batches",
            "use_seedable_sampler",
            "data_seed",
            "non_blocking",
            "use_stateful_dataloader",
        ):
            if given.get(name) is None:
                given[name] = getattr(dataloader_config, name)
    if gradient_accumulation_plugin is not None:
        _once(given, "gradient_accumulation_steps", gradient_accumulation_plugin.num_steps)
        for name in ("adjust_scheduler", "sync_with_dataloader", "sync_each_batch"):
            given[name] = getattr(gradient_accumulation_plugin, name)
    shards = parallelism_config is not None and (parallelism_config.dp_shard_size or 1) > 1
    if given.get("strategy") is None and (fsdp_plugin is not None or shards):
        given["strategy"] = "fsdp"
    return given


def _once(given: dict[str, Any], name: str, value: Any) -> None:
    """
    Raises:
        RuntimeMisuse: it was said twice, differently.
    """
    if given.get(name) not in (None, 1, value):
        raise RuntimeMisuse(f"{name}={given[name]!r} and a plugin that says {value!r}: give it once")
    given[name] = value


def _text(value: Any) -> Any:
    """An enum's value; everything else as it is."""
    names = sys.modules.get("hpcaccel.runtime.enums")
    return value.value if names is not None and isinstance(value, names.Name) else value
