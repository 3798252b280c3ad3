"""Replacements for ``auto`` in DeepSpeed's configuration, computed from the objects of one ``prepare`` call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.deepspeed.engine_wrappers import DummyOptim, DummyScheduler
from hpcaccel.runtime.deepspeed.plugin import DeepSpeedPlugin
from hpcaccel.runtime.parallelism_config import sequence_size

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator_setup import Setup

__all__ = ["EngineParts", "fill_config"]


@dataclass
class EngineParts:
    """The objects of one ``prepare`` that the engine needs."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    """Placeholders, DeepSpeed's own schedulers, and torch's."""
    batch_sizes: list[int | None] = field(default_factory=list)

    @property
    def optimizer(self) -> Any:
        """The optimizer or its placeholder; None if there is none."""
        return self.optimizers[0] if self.optimizers else None

    @property
    def scheduler(self) -> Any:
        """The scheduler that the engine steps: a placeholder or DeepSpeed's own; None if there is none."""
        found = (one for one in self.schedulers if isinstance(one, DummyScheduler) or _is_of_engine(one))
        return next(found, None)

    @classmethod
    def of(cls, setup: Setup, objects: Sequence[Any]) -> EngineParts:
        """The objects that are not prepared yet."""
        parts, registry = cls(), setup.session.registry
        for item in objects:
            is_loader = hasattr(item, "batch_size") and hasattr(item, "dataset")
            if is_loader:
                parts.batch_sizes.append(_batch_size(item))
            elif registry.has(item):
                continue
            elif isinstance(item, nn.Module):
                registry.refuse_original(item)
                parts.models.append(item)
            elif isinstance(item, Optimizer | DummyOptim):
                registry.refuse_original(item)
                parts.optimizers.append(item)
            elif isinstance(item, LRScheduler | DummyScheduler) or _is_of_engine(item):
                registry.refuse_original(item)
                parts.schedulers.append(item)
        return parts


def _batch_size(loader: Any) -> int | None:
    """Number of samples per batch; for a prepared loader, of this rank. None if batches have no fixed size."""
    sampler = getattr(loader, "batch_sampler", None)
    size = loader.batch_size if loader.batch_size is not None else getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _is_of_engine(scheduler: Any) -> bool:
    """Whether this is one of DeepSpeed's own schedulers, which are not torch's."""
    return type(scheduler).__module__.startswith("deepspeed.")


def fill_config(setup: Setup, plugin: DeepSpeedPlugin, parts: EngineParts) -> None:
    """Replace each ``auto`` value of the configuration, and adopt its number of micro-batches.

    Raises:
        RuntimeMisuse: a value cannot be computed; batch sizes contradict each other; an optimizer or a scheduler is
            both in the configuration and in the script, or has a placeholder and is in neither.
    """
    accumulation, config = setup.accumulation, plugin.deepspeed_config
    optimizer, scheduler = parts.optimizer, parts.scheduler
    _refuse_config(plugin, parts)
    plugin.fill_match("gradient_accumulation_steps", must_match=False, gradient_accumulation_steps=accumulation.steps)
    micro_batches = plugin.get_value("gradient_accumulation_steps")
    if micro_batches != accumulation.steps:
        if accumulation.steps != 1:
            setup.session.loop.context.log_once(
                f"gradient_accumulation_steps is {micro_batches}, from the DeepSpeed configuration, not "
                f"{accumulation.steps}"
            )
        accumulation.set_steps(micro_batches)
    values: dict[str, Any] = {
        "gradient_clipping": 1.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        **dict(_sizes(setup, plugin, parts, micro_batches)),
        **dict(_sizes_of_model(plugin, parts.models[0])),
        **dict(_values_of_optimizer(optimizer)),
        **dict(_values_of_scheduler(setup, scheduler)),
    }
    plugin.set_moe_leaf_modules(parts.models[0])
    plugin.deepspeed_config_process(must_match=False, **values)
    if isinstance(optimizer, Optimizer):
        config["zero_allow_untested_optimizer"] = True
    wanted = values.get("train_batch_size")
    if wanted is not None and config.get("train_batch_size", wanted) != wanted:
        raise RuntimeMisuse(
            f"train_batch_size is {config['train_batch_size']} in the DeepSpeed configuration, but "
            f"{values['train_micro_batch_size_per_gpu']} samples × {micro_batches} micro-batches × "
            f"{wanted // (values['train_micro_batch_size_per_gpu'] * micro_batches)} ranks are {wanted}: write auto "
            "instead"
        )


def _refuse_config(plugin: DeepSpeedPlugin, parts: EngineParts) -> None:
    """Refuse an optimizer or scheduler that is in both places, and a placeholder for none."""
    for kind, items, dummy in (
        ("optimizer", parts.optimizers, DummyOptim),
        ("scheduler", parts.schedulers, DummyScheduler),
    ):
        configured = kind in plugin.deepspeed_config
        if configured and any(not isinstance(one, dummy) for one in items):
            raise RuntimeMisuse(
                f"there are two {kind}s: one in the DeepSpeed configuration, and one in the script. Remove the section "
                f"{kind!r} from the configuration, or create hpcaccel.utils.{dummy.__name__} in the script"
            )
        stands_for_none = [one for one in items if isinstance(one, dummy) and not configured]
        if any(getattr(one, "lr_scheduler_callable", None) is None for one in stands_for_none):
            raise RuntimeMisuse(
                f"{dummy.__name__} stands for the section {kind!r} of the DeepSpeed configuration, which is missing. "
                f"Add it, or create a torch {kind}"
            )
    if isinstance(parts.optimizer, DummyOptim) and any(isinstance(one, LRScheduler) for one in parts.schedulers):
        raise RuntimeMisuse("with DummyOptim, use DummyScheduler: the engine creates the optimizer and its scheduler")


def _sizes(setup: Setup, plugin: DeepSpeedPlugin, parts: EngineParts, micro_batches: int) -> Iterator[tuple[str, int]]:
    """Batch sizes, from the configuration or from the loaders in the same ``prepare``."""
    name, world_size = "train_micro_batch_size_per_gpu", setup.session.group.world_size
    batches = world_size // sequence_size(setup.session.handlers.parallelism)  # that are trained on at the same time
    if not plugin.is_auto(name):
        size = plugin.get_value(name)
        if size is None:
            return
    else:
        known = [size for size in parts.batch_sizes if size is not None]
        if not known:
            raise RuntimeMisuse(
                f"{name} is not set, and prepare() got no loader with a batch size. Pass the training's loader to the "
                f"same prepare(), or set accelerator.deepspeed_plugin.deepspeed_config[{name!r}]"
            )
        if setup.settings.split_batches:
            known = [size // world_size for size in known]
        size = min(known) if plugin.is_train_batch_min else max(known)
    yield name, size
    yield "train_batch_size", size * micro_batches * batches


def _sizes_of_model(plugin: DeepSpeedPlugin, model: nn.Module) -> Iterator[tuple[str, int]]:
    """ZeRO's bucket sizes, from the hidden size in the model's ``config``, as transformers sets it."""
    config = getattr(model, "config", None)
    hidden = getattr(config, "hidden_size", None) or max(getattr(config, "hidden_sizes", None) or [0])
    if not isinstance(hidden, int) or not hidden:
        return
    yield "zero_optimization.reduce_bucket_size", hidden * hidden
    yield "zero_optimization.stage3_prefetch_bucket_size", int(0.9 * hidden * hidden)
    yield "zero_optimization.stage3_param_persistence_threshold", 10 * hidden


def _values_of_optimizer(optimizer: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(optimizer, DummyOptim):
        values = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
        yield from ((f"optimizer.params.{name}", value) for name, value in values.items())


def _values_of_scheduler(setup: Setup, scheduler: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(scheduler, DummyScheduler) or scheduler.lr_scheduler_callable is not None:
        return
    optimizer = scheduler.optimizer
    lr = getattr(optimizer, "lr", None) if isinstance(optimizer, DummyOptim) else optimizer.defaults["lr"]
    values = {"warmup_min_lr": 0, "warmup_max_lr": lr, "warmup_num_steps": max(1, scheduler.warmup_num_steps)}
    if scheduler.total_num_steps is not None:
        settings = setup.settings
        per_process = settings.step_scheduler_per_process and not settings.split_batches
        ranks = setup.session.group.world_size if per_process else 1
        values["total_num_steps"] = math.ceil(scheduler.total_num_steps / ranks)
    yield from ((f"scheduler.params.{name}", value) for name, value in values.items())
