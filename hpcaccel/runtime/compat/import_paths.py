"""Accelerate's import paths that have no file here: modules created at run time, and ``__getattr__`` of other modules.

``hpcaccel.utils.operations``, ``hpcaccel.commands.launch`` and others are modules in ``sys.modules``, created when this
module is imported. They look up names in their package. Accelerate's names that hpcaccel does not have raise an error
with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from hpcaccel.runtime.compat.unsupported import refuse

__all__ = ["find_anywhere", "find_in_commands", "find_in_test_utils", "find_in_utils"]

_UTILS = {
    "dataclasses": """
        AORecipeKwargs AutocastKwargs BnbQuantizationConfig ComputeEnvironment CustomDtype DDPCommunicationHookType
        DataLoaderConfiguration DeepSpeedPlugin DeepSpeedSequenceParallelConfig DistributedDataParallelKwargs
        DistributedType DynamoBackend FP8RecipeKwargs
        FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs
        KwargsHandler LoggerType MSAMPRecipeKwargs ParallelismConfig PrecisionType ProfileKwargs
        ProjectConfiguration RNGType TERecipeKwargs TensorInformation TorchDynamoPlugin
        TorchContextParallelConfig TorchTensorParallelConfig TorchTensorParallelPlugin""",
    "environment": """
        are_libraries_initialized check_cuda_fp8_capability check_cuda_p2p_ib_support clear_environment
        convert_dict_to_env_variables get_cpu_distributed_information get_current_device_type get_gpu_info
        get_int_from_env override_numa_affinity parse_choice_from_env parse_flag_from_env patch_environment
        purge_accelerate_environment set_numa_affinity str_to_bool""",
    "imports": """
        deepspeed_required is_4bit_bnb_available is_8bit_bnb_available is_aim_available is_amdsmi_available
        is_bf16_available is_bitsandbytes_multi_backend_available is_bnb_available is_boto3_available
        is_clearml_available is_comet_ml_available is_cuda_available is_datasets_available
        is_deepspeed_available is_dvclive_available is_fp16_available is_fp8_available is_habana_gaudi1
        is_hpu_available is_import_timer_available is_lomo_available is_matplotlib_available
        is_megatron_lm_available is_mlflow_available is_mlu_available is_mps_available is_msamp_available
        is_musa_available is_neuron_available is_npu_available is_pandas_available is_peft_available
        is_pippy_available is_pynvml_available is_pytest_available is_rich_available is_rocm_available
        is_sagemaker_available is_schedulefree_available is_sdaa_available is_swanlab_available
        is_tensorboard_available is_timm_available is_torch_xla_available is_torchao_available
        is_torchdata_available is_torchdata_stateful_dataloader_available is_torchvision_available
        is_tqdm_available is_trackio_available is_transformer_engine_available
        is_transformer_engine_mxfp8_available is_transformers_available is_triton_available is_wandb_available
        is_weights_only_available is_xccl_available is_xpu_available torchao_required""",
    "memory": "clear_device_cache find_executable_batch_size release_memory",
    "modeling": """
        align_module_device calculate_maximum_sizes check_device_map check_tied_parameters_in_config
        check_tied_parameters_on_same_device clean_device_map compute_module_sizes compute_module_total_buffer_size
        convert_file_size_to_int dtype_byte_size find_tied_parameters get_balanced_memory get_grad_scaler
        get_max_layer_size get_max_memory get_mixed_precision_context_manager get_module_size_with_ties
        get_non_persistent_buffers get_state_dict_offloaded_model has_offloaded_params id_tensor_storage
        infer_auto_device_map is_peft_model load_checkpoint_in_model
        load_offloaded_weights load_state_dict named_module_tensors retie_parameters set_module_tensor_to_device""",
    "offload": """
        OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight
        offload_state_dict offload_weight save_offload_index""",
    "operations": """
        CannotPadNestedTensorWarning DistributedOperationException GatheredParameters broadcast
        broadcast_object_list concatenate
        convert_outputs_to_fp32 convert_to_fp32 copy_tensor_to_devices find_batch_size find_device gather gather_object
        get_data_structure honor_type ignorant_find_batch_size initialize_tensors is_namedtuple
        is_tensor_information is_torch_tensor listify pad_across_processes pad_input_tensors recursively_apply
        reduce send_to_device slice_tensors""",
    "other": """
        check_os_kernel clean_state_dict_for_safetensors compile_regions compile_regions_deepspeed
        compile_regions_fsdp2 convert_bytes
        extract_model_from_parallel get_model_tp_size get_module_children_bottom_up get_pretty_name has_compiled_regions
        is_compiled_module is_port_in_use load merge_dicts model_has_dtensor recursive_getattr save
        wait_for_everyone write_basic_config""",
    "random": "set_seed synchronize_rng_state synchronize_rng_states",
    "launch": """
        PrepareForLaunch prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_simple_launcher_cmd_env
        prepare_tpu""",
    "torch_xla": "install_xla",
    "tqdm": "tqdm",
    "versions": "compare_versions is_torch_version",
    "ao": """
        convert_model_to_fp8_ao filter_first_and_last_linear_layers filter_linear_layers find_first_last_linear_layers
        has_ao_layers""",
    "bnb": "get_keys_to_not_convert has_4bit_bnb_layers load_and_quantize_model replace_with_bnb_layers",
    "transformer_engine": """
        apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers""",
    "deepspeed": """
        DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim DummyScheduler
        HfDeepSpeedConfig get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed""",
    "fsdp_utils": """
        disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_apply_ac
        fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters
        get_fsdp2_grad_scaler load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model
        save_fsdp_optimizer""",
    "megatron_lm": "",
}
"""Names by submodule of ``hpcaccel.utils``."""

_TEST_UTILS = {
    "testing": "are_the_same_tensors assert_exception get_backend torch_device",
    "training": "RegressionDataset RegressionModel",
}

_CONFIG_FILE = "default_config_file default_json_config_file default_yaml_config_file load_config_from_file"
_COMMANDS = {
    "config": f"ClusterConfig {_CONFIG_FILE}",
    "config.config_args": f"ClusterConfig {_CONFIG_FILE}",
    "config.default": "write_basic_config",
    "estimate": """
        check_has_model create_empty_model estimate_command estimate_command_parser estimate_training_usage
        gather_data""",
    "launch": "launch_command launch_command_parser",
    **dict.fromkeys(("accelerate_cli", "config.config", "env", "merge", "test", "to_fsdp2", "tpu", "utils"), ""),
}
_PROGRAMS = ("accelerate_cli", "config.config", "env", "estimate", "launch", "merge", "test")
"""Modules of ``commands`` that ``python -m`` can start."""


def find_in_utils(name: str) -> Any:
    """``__getattr__`` of ``hpcaccel.utils``: returns a submodule that has no file.

    Raises:
        ImportError: an Accelerate name that hpcaccel does not have.
        AttributeError: any other name.
    """
    return sys.modules[f"hpcaccel.utils.{name}"] if name in _UTILS else refuse(name)


def find_in_commands(name: str) -> Any:
    """``__getattr__`` of ``hpcaccel.commands``: returns a submodule that has no file.

    Raises:
        ImportError: any other name; the message contains the replacements.
        AttributeError: a name with two leading underscores.
    """
    return sys.modules[f"hpcaccel.commands.{name}"] if name in _COMMANDS else _refuse_command(name)


def find_in_test_utils(name: str) -> Any:
    """``__getattr__`` of ``hpcaccel.test_utils``: returns a submodule that has no file.

    Raises:
        ImportError: any other name; the message contains the replacements.
        AttributeError: a name with two leading underscores.
    """
    return sys.modules[f"hpcaccel.test_utils.{name}"] if name in _TEST_UTILS else _refuse_test_aid(name)


def find_anywhere(name: str) -> Any:
    """``__getattr__`` of ``hpcaccel.accelerator``: returns the value of any name of ``hpcaccel.utils`` or ``hpcaccel``.
    Scripts import names from Accelerate's module ``accelerator`` that exist there only because the module imports them.

    Raises:
        ImportError: an Accelerate name that hpcaccel does not have.
        AttributeError: any other name.
    """
    if not name.startswith("__"):
        for package in ("hpcaccel.utils", "hpcaccel"):
            if name in getattr(import_module(package), "__all__", ()) or name in vars(sys.modules[package]):
                return getattr(sys.modules[package], name)
    refuse(name)


def _refuse_command(name: str) -> NoReturn:
    _refuse_any(
        name,
        "Accelerate's other commands are programs here: use `hpcaccel config`, `hpcaccel env` and `hpcaccel test`, and "
        "`hpcaccel checkpoint convert` instead of merge-weights",
    )


def _refuse_test_aid(name: str) -> NoReturn:
    _refuse_any(
        name,
        "It is made for Accelerate's own tests. In the tests of a script, use pytest.mark.skipif, subprocess.run and "
        "torch.cuda.is_available()",
    )


def _refuse_any(name: str, reason: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"hpcaccel has no {name}. {reason}")


def _make_module(package: str, module: str, names: list[str], refuse_name: Callable[[str], NoReturn]) -> ModuleType:
    def find(name: str) -> Any:
        if f"{made.__name__}.{name}" in sys.modules:
            return sys.modules[f"{made.__name__}.{name}"]
        return getattr(import_module(package), name) if name in names else refuse_name(name)

    made = ModuleType(f"{package}.{module}", f"Accelerate's import path ``{module}`` for names of ``{package}``.")
    made.__spec__ = ModuleSpec(made.__name__, None)
    made.__package__ = package
    made.__path__ = []  # it may have submodules, and ``python -m`` does not warn that it is imported already
    vars(made).update(__getattr__=find, __dir__=lambda: [*vars(made), *names], __all__=names)
    return made


def _add_modules(package: str, modules: Mapping[str, str], refuse_name: Callable[[str], NoReturn]) -> None:
    """Make ``import package.<module>`` work without a file.

    Args:
        modules: for each module, its names in a string, separated by spaces.
        refuse_name: raises the error for any other name.
    """
    for module, names in modules.items():
        sys.modules[f"{package}.{module}"] = _make_module(package, module, names.split(), refuse_name)


_add_modules("hpcaccel.utils", _UTILS, refuse)
_add_modules("hpcaccel.commands", _COMMANDS, _refuse_command)
for _name in _PROGRAMS:
    sys.modules[f"hpcaccel.commands.{_name}"].__spec__ = spec_from_file_location(
        f"hpcaccel.commands.{_name}", Path(__file__).parents[2] / "cli" / "accelerate_program.py"
    )
_add_modules("hpcaccel.test_utils", _TEST_UTILS, _refuse_test_aid)
