"""What a training script calls. The constructor is here; each group of methods is a face, and the ideas live behind."""

from __future__ import annotations

import os
from typing import Any

from hpcaccel.runtime import configuration
from hpcaccel.runtime.accelerator_mixins.collectives_mixin import TogetherFace
from hpcaccel.runtime.accelerator_mixins.loop_mixin import LoopFace
from hpcaccel.runtime.accelerator_mixins.prepare_mixin import PrepareFace
from hpcaccel.runtime.accelerator_mixins.process_mixin import PlaceFace
from hpcaccel.runtime.accelerator_mixins.save_mixin import SaveFace
from hpcaccel.runtime.accelerator_mixins.tracking_mixin import TrackFace
from hpcaccel.runtime.accelerator_mixins.training_mixin import TrainFace
from hpcaccel.runtime.compat.unsupported_attributes import lacks
from hpcaccel.runtime.distributed import process_states  # noqa: F401 - decorators need it before there is an object

__all__ = ["Accelerator"]


@lacks(
    "deepspeed_ulysses_dl_adapter lomo_backward has_lomo_optimizer maybe_context_parallel native_amp flag_tensor "
    "delayed_fp8_autocast fp8_enabled has_fp8_handler ao_recipe_handler te_recipe_handler "
    "msamp_recipe_handler fp8_recipe_handler autocast_handler ddp_handler init_handler profile_handler scaler_handler"
)
class Accelerator(PlaceFace, PrepareFace, TrainFace, LoopFace, TogetherFace, TrackFace, SaveFace):
    """Takes a training loop to many GPUs, and back from wherever it was stopped.

    What is given here wins over the spec of the run, which wins over the defaults. A second one in the same process
    shares the ranks, the device, the precision, the strategy and all that was prepared with the first, until
    ``end_training`` or ``destroy_process_group``; how its loaders share out the data, how it accumulates gradients and
    what its handlers say is its own. After the end ``prepare`` begins a new training, with the same settings.

    Args:
        device_placement: whether ``prepare`` moves models and batches to the device.
        split_batches: a loader's batch size is that of all ranks together, of which each gets a part.
        mixed_precision: ``no``, ``fp16``, ``bf16`` or, where the hardware has it, ``fp8``.
        gradient_accumulation_steps: micro-batches for one optimizer step.
        cpu: leave GPUs alone.
        dataloader_config: a ``DataLoaderConfiguration``, for all that concerns prepared loaders.
        fsdp_plugin: a ``FullyShardedDataParallelPlugin``; turns ``strategy`` to ``fsdp``.
        torch_tp_plugin: a ``TorchTensorParallelPlugin``.
        rng_types: generators that are brought to rank 0's state whenever a prepared loader is iterated.
        log_with: trackers, by name or as objects; nothing is contacted before ``init_trackers``.
        project_dir: where checkpoints and metrics go when there is no run directory.
        project_config: a ``ProjectConfiguration``.
        gradient_accumulation_plugin: a ``GradientAccumulationPlugin``.
        step_scheduler_with_optimizer: False: prepared schedulers step whenever the script steps them.
        kwargs_handlers: settings of torch's own: ``DistributedDataParallelKwargs`` and its like.
        dynamo_backend, dynamo_plugin: compile prepared models with ``torch.compile``.
        parallelism_config: a ``ParallelismConfig``: replicas, shards, tensor parallel.
        strategy: ``ddp``, or ``fsdp`` to shard the model over the ranks.
        seed: of Python, numpy and torch, on every rank.
        deterministic: fixed algorithms: the same bits in every run and, with prepared loaders, after every resume.
        even_batches: fill up the last batches of an epoch so that all ranks get equally many.
        dispatch_batches: rank 0 reads and sends each rank its part; default: for iterable datasets only.
        step_scheduler_per_process: step prepared schedulers once for each process, as Accelerate does and its users'
            schedules expect; False: once.
        fp32_outputs: return what prepared models compute in fp32, so that losses outside of them keep their precision.
        tp_plan: which modules are shared among tensor-parallel ranks, and how.
        debug: check shapes on all ranks before each collective.

    Raises:
        RankEnvironmentError: the environment describes no usable group of ranks, or they do not find each other.
        RuntimeMisuse: a keyword or a value that is not allowed.
    """

    deepspeed_plugin: None = None
    """Scripts look whether there is one."""

    def __init__(
        self,
        device_placement: bool | None = None,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: Any = None,
        *,
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
        configuration.refuse_unknown(unknown, _known())
        given = configuration.words(
            {
                "device_placement": device_placement,
                "split_batches": split_batches,
                "mixed_precision": mixed_precision,
                "gradient_accumulation_steps": gradient_accumulation_steps,
                "rng_types": None if rng_types is None else tuple(str(kind) for kind in rng_types),
                "step_scheduler_with_optimizer": step_scheduler_with_optimizer,
                "strategy": strategy,
                "seed": seed,
                "deterministic": deterministic,
                "even_batches": even_batches,
                "dispatch_batches": dispatch_batches,
                "step_scheduler_per_process": step_scheduler_per_process,
                "fp32_outputs": fp32_outputs,
                "debug": debug,
            },
            dataloader_config=dataloader_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            fsdp_plugin=fsdp_plugin,
            parallelism_config=parallelism_config,
        )
        handlers = configuration.handlers_by_name(
            kwargs_handlers,
            fsdp=fsdp_plugin,
            tensor_parallel=torch_tp_plugin,
            parallelism=parallelism_config,
            dynamo=dynamo_plugin if dynamo_plugin is not None else dynamo_backend,
            tp_plan=tp_plan,
        )
        if project_config is not None and project_dir is None:
            project_dir = project_config.project_dir
        from hpcaccel.runtime.accelerator_setup import Setup

        self._setup = Setup(cpu=cpu, project_dir=project_dir, handlers=handlers, given=given)
        self._begin_saving(project_config, project_dir)
        self._begin_tracking(log_with)


def _known() -> list[str]:
    names = Accelerator.__init__.__code__.co_varnames
    return list(names[1 : Accelerator.__init__.__code__.co_argcount + Accelerator.__init__.__code__.co_kwonlyargcount])
