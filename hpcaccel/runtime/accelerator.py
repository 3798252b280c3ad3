"""``Accelerator``: the class and its constructor. The methods are in ``accelerator_mixins``, one module per group."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hpcaccel.runtime import configuration
from hpcaccel.runtime.accelerator_mixins.prepare_mixin import PrepareMixin
from hpcaccel.runtime.accelerator_mixins.process_mixin import ProcessMixin
from hpcaccel.runtime.accelerator_mixins.save_mixin import SaveMixin
from hpcaccel.runtime.accelerator_mixins.tracking_mixin import TrackingMixin
from hpcaccel.runtime.accelerator_mixins.training_mixin import TrainingMixin
from hpcaccel.runtime.enums import DistributedType

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator_setup import Setup

__all__ = ["Accelerator"]


class Accelerator(ProcessMixin, PrepareMixin, TrainingMixin, TrackingMixin, SaveMixin):
    """Runs a training loop on many GPUs, with checkpoints, stops and exact resumes.

    Arguments override the run's spec, which overrides the defaults. A second Accelerator in the same process
    shares the ranks, device, precision, strategy and prepared objects of the first, until ``end_training`` or
    ``destroy_process_group``. After either call, ``prepare`` starts a new training with the same settings. Each
    Accelerator has its own loader configuration, gradient accumulation, and settings for autocast, DDP, profiling and
    compilation.

    Args:
        device_placement: whether ``prepare`` moves models and batches to the device.
        split_batches: whether a loader's batch size is the total over all ranks, so that each rank gets a part of every
            batch.
        mixed_precision: ``no``, ``fp16``, ``bf16`` or, if the hardware supports it, ``fp8``.
        gradient_accumulation_steps: number of micro-batches per optimizer step.
        cpu: whether to train on the CPU even if there are GPUs.
        dataloader_config: a ``DataLoaderConfiguration`` for prepared loaders.
        deepspeed_plugin: a ``DeepSpeedPlugin``, or a dict of plugins by name; ``strategy`` is then ``deepspeed``.
        fsdp_plugin: a ``FullyShardedDataParallelPlugin``; ``strategy`` then defaults to ``fsdp``.
        torch_tp_plugin: a ``TorchTensorParallelPlugin``.
        rng_types: random generators that are set to rank 0's state at the start of each epoch of a prepared loader.
        log_with: trackers, by name or as objects; they do nothing before ``init_trackers``.
        project_dir: directory for trackers that write files and, without a run directory, for checkpoints and metrics.
        project_config: a ``ProjectConfiguration``.
        gradient_accumulation_plugin: a ``GradientAccumulationPlugin``.
        step_scheduler_with_optimizer: whether prepared schedulers step only when the optimizer does. If False, they
            step at every call.
        kwargs_handlers: settings for torch, such as ``DistributedDataParallelKwargs``.
        dynamo_backend, dynamo_plugin: a backend or a ``TorchDynamoPlugin``, to compile prepared models with
            ``torch.compile``.
        parallelism_config: a ``ParallelismConfig`` with the numbers of replicas, shards, tensor-parallel ranks, and
            ranks that split sequences.
        deepspeed_plugins: alias of ``deepspeed_plugin``.
        strategy: ``ddp``, ``fsdp`` to shard the model over the ranks, or ``deepspeed`` for DeepSpeed's engine.
        seed: seed for the generators of Python, numpy and torch on every rank.
        deterministic: whether to use deterministic algorithms, which bit-identical runs and resumes require.
        even_batches: whether to repeat samples at the end of an epoch so that all ranks have the same number of
            batches.
        dispatch_batches: whether rank 0 reads the data and sends each rank its part. By default, rank 0 does so only
            for iterable datasets whose batches are moved to the device.
        step_scheduler_per_process: whether prepared schedulers step once per process at each optimizer step, as in
            Accelerate. If False, or with ``split_batches``, they step once.
        fp32_outputs: whether to convert outputs of prepared models to fp32, so that losses are computed in fp32.
        tp_plan: a dict of module names and their tensor-parallel styles.
        debug: whether to compare shapes between ranks before every hpcaccel collective, including collectives of GPU
            tensors.

    Raises:
        RankEnvironmentError: the environment describes no usable group of ranks, or the rendezvous failed.
        RuntimeMisuse: a keyword is unknown; a value is not allowed; a shared setting differs from the first
            Accelerator's.

    Example::

        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for epoch in accelerator.epochs(2):
            for inputs, targets in loader:
                loss = loss_function(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                accelerator.log({"loss": loss})
                accelerator.checkpoint()
    """

    def __init__(
        self,
        device_placement: bool | None = None,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: Any = None,
        *,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        rng_types: list[str] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool | None = None,
        kwargs_handlers: list[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        strategy: str | None = None,
        seed: int | None = None,
        deterministic: bool | None = None,
        even_batches: bool | None = None,
        dispatch_batches: bool | None = None,
        step_scheduler_per_process: bool | None = None,
        fp32_outputs: bool | None = None,
        tp_plan: Any = None,
        debug: bool | None = None,
        **unknown: Any,
    ) -> None:
        configuration.refuse_unknown(unknown, _keywords())
        plugins = {"fsdp": fsdp_plugin, "tensor_parallel": torch_tp_plugin, "parallelism": parallelism_config}
        deepspeed = configuration.one_of(deepspeed_plugin=deepspeed_plugin, deepspeed_plugins=deepspeed_plugins)
        dynamo = dynamo_plugin if dynamo_plugin is not None else dynamo_backend
        plugins |= {"deepspeed": deepspeed, "dynamo": dynamo, "tp_plan": tp_plan}
        handlers = configuration.handlers_by_name(kwargs_handlers, **plugins)
        given = configuration.settings_by_name(
            (handlers, dataloader_config, gradient_accumulation_plugin),
            device_placement=device_placement,
            split_batches=split_batches,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            rng_types=None if rng_types is None else tuple(str(kind) for kind in rng_types),
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            strategy=strategy,
            seed=seed,
            deterministic=deterministic,
            even_batches=even_batches,
            dispatch_batches=dispatch_batches,
            step_scheduler_per_process=step_scheduler_per_process,
            fp32_outputs=fp32_outputs,
            debug=debug,
        )
        self._setup = _setup(handlers, given, cpu=cpu, project_dir=self._set_directories(project_config, project_dir))
        self._select_trackers(log_with)

    # -- what the constructor was given -------------------------------------------------------------------------------

    autocast_handler = configuration.HandlerAttribute("AutocastKwargs")
    ddp_handler = configuration.HandlerAttribute("DistributedDataParallelKwargs")
    profile_handler = configuration.HandlerAttribute("ProfileKwargs")
    scaler_handler = configuration.HandlerAttribute("GradScalerKwargs")
    init_handler = configuration.HandlerAttribute("InitProcessGroupKwargs")
    ao_recipe_handler = configuration.HandlerAttribute("AORecipeKwargs")
    te_recipe_handler = configuration.HandlerAttribute("TERecipeKwargs")
    msamp_recipe_handler = configuration.HandlerAttribute("MSAMPRecipeKwargs")
    fp8_recipe_handler = configuration.HandlerAttribute("FP8RecipeKwargs")

    @property
    def fp8_enabled(self) -> bool:
        """Whether ``mixed_precision`` is ``fp8``."""
        return self.mixed_precision == "fp8"

    @property
    def has_fp8_handler(self) -> bool:
        """Whether one of the four recipes for fp8 is set. With fp8, ``ao_recipe_handler`` is set by default."""
        return self._setup.handlers.fp8 is not None

    @property
    def delayed_fp8_autocast(self) -> bool:
        """Whether the recipe is one of TransformerEngine, and the model is wrapped in DDP on GPUs, or sharded."""
        wrapped = self.distributed_type in (DistributedType.MULTI_GPU, DistributedType.FSDP)
        return self.has_fp8_handler and self.fp8_backend == "TE" and wrapped

    @property
    def native_amp(self) -> bool:
        """Whether prepared models and ``autocast()`` compute under ``torch.autocast``. A script may set it, before it
        prepares its models: True with the precision ``no`` selects torch's default dtype for the device."""
        return self._setup.native_amp

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        self._setup.native_amp_override = bool(value)


def _setup(handlers: Any, given: dict[str, Any], *, cpu: bool, project_dir: Any) -> Setup:
    from hpcaccel.runtime.accelerator_setup import Setup  # and with it the training loop and the process groups

    return Setup(handlers, given, cpu=cpu, project_dir=project_dir)


def _keywords() -> list[str]:
    code = Accelerator.__init__.__code__
    return list(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
