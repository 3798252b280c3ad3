"""Processes arguments of ``Accelerator(...)``: checks keywords, and collects settings, plugins and handlers by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallelism_config import shards_model

__all__ = [
    "OWN_HANDLERS",
    "SUCCESSORS",
    "HandlerAttribute",
    "handlers_by_name",
    "one_of",
    "refuse_unknown",
    "settings_by_name",
]

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
"""For each class of kwargs handlers, the name of what it configures."""
PLUGINS = ("fsdp", "deepspeed", "tensor_parallel", "parallelism", "dynamo", "tp_plan")
OWN_HANDLERS = ("autocast", "ddp", "profile", "dynamo", "tp_plan")
"""Handlers that each Accelerator has for itself. All Accelerators of a process share the other handlers."""

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
"""Keywords that ``Accelerator()`` does not accept, with their replacements."""
ELSEWHERE = {
    "megatron_lm_plugin": (
        'Megatron-LM is not supported: strategy="fsdp" and ParallelismConfig(tp_size=...) shard models'
    ),
}
"""Keywords that are accepted only as None, with the reason."""


_OF_LOADERS = (
    "split_batches",
    "dispatch_batches",
    "even_batches",
    "use_seedable_sampler",
    "data_seed",
    "non_blocking",
    "use_stateful_dataloader",
)
"""Fields of ``DataLoaderConfiguration``."""


def refuse_unknown(unknown: Mapping[str, Any], known: list[str]) -> None:
    """Refuse unknown keywords.

    Raises:
        RuntimeMisuse: there is an unknown keyword, or a keyword in ``ELSEWHERE`` whose value is not None. The message
            contains the keyword's replacement or the known keywords.
    """
    for name, value in unknown.items():
        if name in ELSEWHERE:
            if value is None:
                continue
            raise RuntimeMisuse(f"Accelerator({name}=...): {ELSEWHERE[name]}")
        hint = f"Use {SUCCESSORS[name]}" if name in SUCCESSORS else f"Use one of: {', '.join(known)}"
        raise RuntimeMisuse(f"Accelerator({name}={value!r}): unknown keyword argument {name!r}. {hint}")


def handlers_by_name(kwargs_handlers: list[Any] | None, **plugins: Any) -> SimpleNamespace:
    """Handlers and plugins by the name of what they configure, each None if not given.

    Raises:
        RuntimeMisuse: an object is not a handler, or there are two handlers of the same kind.
    """
    found: dict[str, Any] = {**dict.fromkeys(HANDLERS.values()), **dict.fromkeys(PLUGINS), **plugins}
    for handler in kwargs_handlers or []:
        name = HANDLERS.get(kind_of(handler))
        if name is None:
            allowed = ", ".join(sorted(HANDLERS))
            raise RuntimeMisuse(f"kwargs_handlers contains {handler!r}, which is not a handler (allowed: {allowed})")
        if found[name] is not None:
            raise RuntimeMisuse(f"kwargs_handlers contains two handlers for {name}: pass one of them")
        found[name] = handler
    return SimpleNamespace(**found)


def kind_of(handler: object) -> str:
    """The class in ``HANDLERS`` of which ``handler`` is an instance, by name, so that Accelerate's own objects are
    recognised; an empty text if there is none."""
    return next((kind.__name__ for kind in type(handler).__mro__ if kind.__name__ in HANDLERS), "")


class HandlerAttribute:
    """An attribute of the Accelerator: the handler of one kind that was passed to the constructor; None if there is
    none.

    A handler that each Accelerator has for itself may be changed in place or replaced. This affects what is prepared or
    called afterwards. Handlers that all Accelerators share have been used already, and cannot be replaced.

    Args:
        kind: class of the handler, a key of ``HANDLERS``.

    Raises:
        RuntimeMisuse: the assigned value is a handler of another kind, or the handler cannot be replaced.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, accelerator: Any, owner: type) -> Any:
        if accelerator is None:
            return self
        found = getattr(accelerator._setup.handlers, HANDLERS[self._kind])
        return found if kind_of(found) == self._kind else None

    def __set__(self, accelerator: Any, handler: Any) -> None:
        name = HANDLERS[self._kind]
        if name not in OWN_HANDLERS:
            raise RuntimeMisuse(
                f"accelerator.{self._attribute} = {handler!r} has no effect: the {self._kind} has been used already. "
                f"Pass it to the constructor: Accelerator(kwargs_handlers=[{self._kind}(...)])"
            )
        if handler is not None and kind_of(handler) != self._kind:
            raise RuntimeMisuse(f"accelerator.{self._attribute} = {handler!r}: assign a {self._kind}, or None")
        accelerator._setup.replace_handler(name, handler)


def one_of(**given: Any) -> Any:
    """The value that is not None; None if there is none.

    Raises:
        RuntimeMisuse: several values are not None.
    """
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) > 1:
        raise RuntimeMisuse(
            f"Accelerator({'=..., '.join(found)}=...): these keywords have the same meaning. Pass one of them"
        )
    return next(iter(found.values()), None)


def settings_by_name(plugins: tuple[SimpleNamespace, Any, Any], **arguments: Any) -> dict[str, Any]:
    """Settings by name, each None if not given. A plugin provides settings that the plain arguments do not.

    Args:
        plugins: the handlers by name, the ``DataLoaderConfiguration`` and the ``GradientAccumulationPlugin``.
        arguments: plain arguments of the constructor.

    Raises:
        RuntimeMisuse: ``gradient_accumulation_steps`` is above 1 and differs from the plugin's ``num_steps``; or a
            DeepSpeedPlugin and another strategy are given.
    """
    handlers, dataloader_config, accumulation_plugin = plugins
    given = {name: _text(value) for name, value in arguments.items()}
    if dataloader_config is not None:
        for name in _OF_LOADERS:
            if given.get(name) is None:
                given[name] = getattr(dataloader_config, name)
    if accumulation_plugin is not None:
        _set_once(given, "gradient_accumulation_steps", accumulation_plugin.num_steps)
        for name in ("adjust_scheduler", "sync_with_dataloader", "sync_each_batch"):
            given[name] = getattr(accumulation_plugin, name)
    shards = shards_model(handlers.parallelism)
    if handlers.deepspeed is not None:
        wants = {"fsdp_plugin": handlers.fsdp is not None, "dp_shard_size or cp_size": shards}
        _refuse_beside_deepspeed(given.get("strategy"), **wants)
        given["strategy"] = "deepspeed"
    if given.get("strategy") is None and (handlers.fsdp is not None or shards):
        given["strategy"] = "fsdp"
    return given


def _refuse_beside_deepspeed(strategy: Any, **sharding: bool) -> None:
    """Raise RuntimeMisuse if the script passes a DeepSpeedPlugin and another strategy."""
    found = [f"strategy={strategy!r}"] if strategy not in (None, "deepspeed") else []
    found += [name for name, given in sharding.items() if given]
    if found:
        raise RuntimeMisuse(
            f"Accelerator(deepspeed_plugin=...) cannot be combined with {', '.join(found)}: DeepSpeed shards the model "
            "itself. Pass one of them"
        )


def _set_once(given: dict[str, Any], name: str, value: Any) -> None:
    """Set ``given[name]`` to ``value``.

    Raises:
        RuntimeMisuse: ``given`` has a value of ``name`` other than None, 1 and ``value``.
    """
    if given.get(name) not in (None, 1, value):
        raise RuntimeMisuse(
            f"{name}={given[name]!r} conflicts with {value!r} in the GradientAccumulationPlugin: set it in one place"
        )
    given[name] = value


def _text(value: Any) -> Any:
    """The value of an enum member; other values are returned unchanged."""
    enums = sys.modules.get("hpcaccel.runtime.enums")
    return value.value if enums is not None and isinstance(value, enums.NameEnum) else value
