"""Accelerate's names that hpcaccel does not have: the reason for each, and the replacement.

The modules with Accelerate's import paths take their ``__getattr__`` from here, so that the error of
``from hpcaccel.utils import MegatronLMPlugin`` gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

__all__ = ["REASONS", "lacks", "refuse", "why"]

Class = TypeVar("Class", bound=type)

_REASONS = {
    "hpcaccel starts the ranks of a DeepSpeed training like all others: `hpcaccel submit`, `hpcaccel launch`, srun or "
    "torchrun": """
        prepare_deepspeed_cmd_env DEEPSPEED_MULTINODE_LAUNCHERS""",
    "DeepSpeed's engine compiles the whole model: pass Accelerator(dynamo_backend=...)": """
        compile_regions_deepspeed""",
    "Megatron-LM is not supported: strategy='fsdp' and ParallelismConfig(tp_size=...) with a tp_plan shard large "
    "models": """
        AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader MegatronLMDummyScheduler
        MegatronLMOptimizerWrapper MegatronLMPlugin MegatronLMSchedulerWrapper T5TrainStep
        add_model_config_to_megatron_parser avg_losses_across_data_parallel_group gather_across_data_parallel_groups
        megatron_lm_initialize megatron_lm_prepare_data_loader megatron_lm_prepare_model_optimizer_scheduler
        megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler""",
    "Pipeline parallelism is not supported: use torch.distributed.pipelining": """
        build_pipeline find_pippy_batch_size generate_device_map pippy_forward prepare_pippy""",
    "Quantised loading is not supported: insert the bitsandbytes modules into the model before prepare()": """
        BnbQuantizationConfig has_4bit_bnb_layers load_and_quantize_model""",
    "prepare() inserts the fp8 modules if mixed_precision='fp8' and the hardware supports fp8": """
        apply_fp8_autowrap contextual_fp8_autocast convert_model convert_model_to_fp8_ao
        filter_first_and_last_linear_layers has_ao_layers has_transformer_engine_layers CustomDtype""",
    "`hpcaccel launch --tpu` starts a rank on each TPU core, and PJRT_DEVICE=TPU selects TPUs. Install torch_xla with "
    "pip, in torch's version": """
        install_xla prepare_tpu""",
    "SageMaker is not supported: `hpcaccel submit` submits jobs to Slurm": """
        SageMakerDistributedType prepare_sagemager_args_inputs SAGEMAKER_PARALLEL_EC2_INSTANCES
        SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION SAGEMAKER_TRANSFORMERS_VERSION""",
    "Splitting sequences over ranks is not supported: ParallelismConfig has dp_replicate_size, dp_shard_size and "
    "tp_size": """
        DeepSpeedSequenceParallelConfig TorchContextParallelConfig deepspeed_ulysses_dl_adapter
        maybe_context_parallel""",
    "It is internal to Accelerate's launchers. Start ranks with `hpcaccel launch`, or with notebook_launcher; "
    "patch_environment and clear_environment change variables for a while": """
        PrepareForLaunch TORCH_LAUNCH_PARAMS prepare_multi_gpu_env prepare_simple_launcher_cmd_env test_launch
        purge_accelerate_environment""",
    "Slurm places ranks and binds them to CPUs: set `slurm.cpus_per_task`, or srun's --cpu-bind": """
        check_cuda_p2p_ib_support get_cpu_distributed_information get_gpu_info override_numa_affinity
        set_numa_affinity""",
    "prepare() does this with FSDP2's own functions: configure it with FullyShardedDataParallelPlugin or "
    "runtime.fsdp": """
        disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_apply_ac
        fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters
        get_fsdp2_grad_scaler compile_regions_fsdp2 get_model_tp_size""",
    "A checkpoint is one directory of checksummed shards that any number of ranks can load: use "
    "accelerator.save_state() and load_state(). For a model file, use save_model() or get_state_dict()": """
        FSDP_MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME
        load_accelerator_state load_custom_state load_fsdp_model load_fsdp_optimizer merge_fsdp_weights
        save_accelerator_state save_custom_state save_fsdp_model save_fsdp_optimizer""",
    "Values of FullyShardedDataParallelPlugin and of the FSDP_* variables are checked where they are read": """
        FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE
        FSDP2_STATE_DICT_TYPE""",
    "It is for Accelerate's own checks of versions and distributed types, which hpcaccel does not need": """
        BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION
        BETA_TP_AVAILABLE_TRANSFORMERS_VERSION DTENSOR_PYTORCH_VERSION
        ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP_PYTORCH_VERSION
        MITA_PROFILING_AVAILABLE_PYTORCH_VERSION XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
        TORCH_DISTRIBUTED_OPERATION_TYPES""",
    "Use accelerator.autocast() for mixed precision, and accelerator.scaler for the gradient scaler": """
        get_grad_scaler get_mixed_precision_context_manager native_amp delayed_fp8_autocast fp8_enabled
        has_fp8_handler""",
    "Handlers that were passed to Accelerator(...) cannot be read back: keep them in a variable": """
        ao_recipe_handler te_recipe_handler msamp_recipe_handler fp8_recipe_handler autocast_handler ddp_handler
        init_handler profile_handler scaler_handler""",
    "LOMO is not supported: it fuses backward and step, so gradients can be neither synchronised nor clipped": """
        has_lomo_optimizer lomo_backward""",
    "hpcaccel has different classes for prepared loaders: accelerator.prepare(loader) creates one, "
    "hpcaccel.skip_first_batches skips batches, and hpcaccel.PermutationSampler shuffles": """
        DataLoaderAdapter DataLoaderStateMixin SkipDataLoader IterableDatasetShard""",
    "It is internal to Accelerate, and hpcaccel does not need it": """
        CUDA_DISTRIBUTED_TYPES STR_OPERATION_TO_FUNC TORCH_DYNAMO_MODES
        CannotPadNestedTensorWarning ThreadLocalSharedDict do_nothing move_to_device patch_optimizer_step
        rich flag_tensor fork_launched""",
}

REASONS = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Reasons by name. Attributes of the Accelerator and of the states are included."""


def why(name: str) -> str | None:
    """Why hpcaccel does not have an Accelerate name, and what to use instead; None for any other name."""
    return REASONS.get(name)


def refuse(name: str) -> NoReturn:
    """Raise the error for a missing name; called by ``__getattr__`` of a module.

    Raises:
        ImportError: Accelerate has the name; the message gives the reason, which ``from module import name`` would not
            show for an AttributeError.
        AttributeError: any other name.
    """
    reason = why(name)
    if reason is None:
        raise AttributeError(f"hpcaccel has no {name!r} under this import path")
    raise ImportError(f"hpcaccel has no {name}. {reason}")


def __getattr__(name: str) -> Any:
    refuse(name)


class _MissingAttribute:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__}.{self._name} is not available. {why(self._name)}")


def lacks(names: str) -> Callable[[Class], Class]:
    """Class decorator: reading one of these attributes, which Accelerate's class has, raises AttributeError with the
    reason, so that ``hasattr`` returns False.

    Args:
        names: keys of ``REASONS``, separated by spaces.
    """

    def mark(kind: Class) -> Class:
        for name in names.split():
            setattr(kind, name, _MissingAttribute(name))
        return kind

    return mark
