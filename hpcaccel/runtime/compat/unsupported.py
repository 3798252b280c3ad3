"""Names of Accelerate's that are not here: why, and what does the same.

The pages with Accelerate's import paths take their ``__getattr__`` from here, so that
``from hpcaccel.utils import DeepSpeedPlugin`` says more than that there is no such name.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["REASONS", "refuse", "refuse_all", "why"]

_REASONS = {
    "DeepSpeed is not here: Accelerator(strategy='fsdp') shards parameters, gradients and optimizer state": """
        DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedPlugin DeepSpeedSchedulerWrapper
        DeepSpeedSequenceParallelConfig GatheredParameters HfDeepSpeedConfig
        compile_regions_deepspeed get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed
        prepare_deepspeed_cmd_env DEEPSPEED_MULTINODE_LAUNCHERS deepspeed_plugins deepspeed_ulysses_dl_adapter
        get_deepspeed_plugin select_deepspeed_plugin""",
    "Megatron-LM is not here: strategy='fsdp' and ParallelismConfig(tp_size=...) with a tp_plan shard large models": """
        AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader MegatronLMDummyScheduler
        MegatronLMOptimizerWrapper MegatronLMPlugin MegatronLMSchedulerWrapper T5TrainStep
        add_model_config_to_megatron_parser avg_losses_across_data_parallel_group gather_across_data_parallel_groups
        megatron_lm_initialize megatron_lm_prepare_data_loader megatron_lm_prepare_model_optimizer_scheduler
        megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler""",
    "Big-model inference (device maps, offloading layer by layer) is not here: strategy='fsdp' with "
    "init_empty_weights and load_sharded holds a model that is larger than one GPU": """
        AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook OffloadedWeightsLoader PrefixedDataset SequentialHook
        UserCpuOffloadHook add_hook_to_module align_module_device attach_align_device_hook
        attach_align_device_hook_on_blocks attach_execution_device_hook attach_layerwise_casting_hooks check_device_map
        check_tied_parameters_in_config check_tied_parameters_on_same_device cpu_offload cpu_offload_with_hook
        disk_offload dispatch_model extract_submodules_state_dict get_balanced_memory get_max_layer_size get_max_memory
        has_offloaded_params infer_auto_device_map load_checkpoint_and_dispatch load_offloaded_weight
        load_offloaded_weights offload_state_dict offload_weight remove_hook_from_module remove_hook_from_submodules
        save_offload_index set_module_tensor_to_device""",
    "Pipelines over GPUs are not here: torch.distributed.pipelining is torch's own": """
        build_pipeline find_pippy_batch_size generate_device_map pippy_forward prepare_pippy""",
    "Quantised loading is not here: put bitsandbytes' own modules into the model before prepare()": """
        BnbQuantizationConfig has_4bit_bnb_layers load_and_quantize_model""",
    "fp8 modules are put into the model by prepare() where mixed_precision='fp8' and the hardware has it": """
        apply_fp8_autowrap contextual_fp8_autocast convert_model convert_model_to_fp8_ao
        filter_first_and_last_linear_layers has_ao_layers has_transformer_engine_layers CustomDtype""",
    "TPUs (torch_xla) are not driven here": """
        install_xla prepare_tpu""",
    "SageMaker is not a place to run here: `hpcaccel submit` brings a job to Slurm": """
        SageMakerDistributedType prepare_sagemager_args_inputs SAGEMAKER_PARALLEL_EC2_INSTANCES
        SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION SAGEMAKER_TRANSFORMERS_VERSION""",
    "Sequences are not split over ranks here: ParallelismConfig has dp_replicate_size, dp_shard_size, tp_size": """
        TorchContextParallelConfig maybe_context_parallel""",
    "There is no `accelerate launch`, no config file: `hpcaccel submit job.yaml`, srun or torchrun start ranks": """
        PrepareForLaunch TORCH_LAUNCH_PARAMS prepare_multi_gpu_env prepare_simple_launcher_cmd_env test_launch
        write_basic_config purge_accelerate_environment""",
    "Slurm places ranks and binds them to processors: `slurm.cpus_per_task`, srun's --cpu-bind": """
        check_cuda_p2p_ib_support get_cpu_distributed_information get_gpu_info set_numa_affinity""",
    "prepare() does this with FSDP2's own functions; FullyShardedDataParallelPlugin or runtime.fsdp say how": """
        disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_apply_ac
        fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters
        get_fsdp2_grad_scaler compile_regions_fsdp2 get_model_tp_size""",
    "A checkpoint here is one committed directory of checksummed shards, loaded at any number of ranks: "
    "accelerator.save_state() and load_state(); for a model file, save_model() and get_state_dict()": """
        FSDP_MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME
        load_accelerator_state load_custom_state load_fsdp_model load_fsdp_optimizer merge_fsdp_weights
        save_accelerator_state save_custom_state save_fsdp_model save_fsdp_optimizer""",
    "What FullyShardedDataParallelPlugin and the FSDP_* variables may say is checked where they are read": """
        FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE
        FSDP2_STATE_DICT_TYPE""",
    "It depends on nothing but torch's version, and torch is never that old here": """
        BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION
        BETA_TP_AVAILABLE_TRANSFORMERS_VERSION DTENSOR_PYTORCH_VERSION
        ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP_PYTORCH_VERSION
        MITA_PROFILING_AVAILABLE_PYTORCH_VERSION XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
        TORCH_DISTRIBUTED_OPERATION_TYPES""",
    "The precision's context is accelerator.autocast(), its scaler accelerator.scaler": """
        get_grad_scaler get_mixed_precision_context_manager native_amp delayed_fp8_autocast fp8_enabled
        has_fp8_handler""",
    "What was given to Accelerator(...) is its own business; the script that gave it has it": """
        ao_recipe_handler te_recipe_handler msamp_recipe_handler fp8_recipe_handler autocast_handler ddp_handler
        init_handler profile_handler scaler_handler""",
    "LOMO is not here: it fuses backward and step, which leaves nothing to synchronise or to clip": """
        has_lomo_optimizer lomo_backward""",
    "The classes behind prepared loaders are others here: accelerator.prepare(loader) makes one, "
    "hpcaccel.skip_first_batches skips, hpcaccel.PermutationSampler shuffles": """
        DataLoaderAdapter DataLoaderStateMixin SkipDataLoader IterableDatasetShard""",
    "It is of Accelerate's inside; nothing here needs it": """
        CUDA_DISTRIBUTED_TYPES STR_OPERATION_TO_FUNC SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING TORCH_DYNAMO_MODES
        CannotPadNestedTensorWarning ThreadLocalSharedDict do_nothing move_to_device patch_optimizer_step
        rich flag_tensor fork_launched""",
}

REASONS = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""By name; attributes of the Accelerator and of the states too."""


def why(name: str) -> str | None:
    """The reason why a name of Accelerate's is not here, and what to use; None for any other name."""
    return REASONS.get(name)


def refuse(name: str) -> NoReturn:
    """For ``__getattr__`` of a page.

    Raises:
        ImportError: with the reason, where the name is Accelerate's; of another error ``from page import name`` would
            not show the words.
        AttributeError: any other name.
    """
    reason = why(name)
    if reason is None:
        raise AttributeError(f"module 'hpcaccel' has no attribute {name!r}")
    raise ImportError(f"hpcaccel has no {name}. {reason}")


def __getattr__(name: str) -> Any:
    refuse(name)


def refuse_all(name: str, reason: str) -> NoReturn:
    """For ``__getattr__`` of a page with nothing but what is not here.

    Raises:
        ImportError: with the reason.
        AttributeError: Python itself has asked.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"hpcaccel has no {name}. {reason}")
