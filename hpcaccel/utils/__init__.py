"""The names of Accelerate's ``utils`` that hpcaccel supports. Importing any other name of Accelerate's ``utils`` raises
an error that gives the reason.

Most submodules (``hpcaccel.utils.operations`` and others) have no files: ``hpcaccel.runtime.compat.import_paths``
creates them when they are imported.
"""

from hpcaccel.checkpoint_files.weight_files import MODEL_NAME as MODEL_NAME
from hpcaccel.checkpoint_files.weight_files import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from hpcaccel.checkpoint_files.weight_files import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from hpcaccel.checkpoint_files.weight_files import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from hpcaccel.checkpoint_files.weight_files import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
from hpcaccel.checkpoint_files.weight_files import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from hpcaccel.checkpoint_files.weight_files import WEIGHTS_NAME as WEIGHTS_NAME
from hpcaccel.checkpoint_files.weight_files import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
from hpcaccel.errors import DistributedOperationException as DistributedOperationException
from hpcaccel.launch.launch_function import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from hpcaccel.launch.launch_function import prepare_multi_gpu_env as prepare_multi_gpu_env
from hpcaccel.launch.launch_function import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
from hpcaccel.runtime.checkpointing.export_model import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
)
from hpcaccel.runtime.checkpointing.load_model import load_state_dict as load_state_dict
from hpcaccel.runtime.checkpointing.mapped_load import load_checkpoint_in_model as load_checkpoint_in_model
from hpcaccel.runtime.checkpointing.quantized_load import load_and_quantize_model as load_and_quantize_model
from hpcaccel.runtime.compat.accelerator_files import OPTIMIZER_NAME as OPTIMIZER_NAME
from hpcaccel.runtime.compat.accelerator_files import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
from hpcaccel.runtime.compat.accelerator_files import RNG_STATE_NAME as RNG_STATE_NAME
from hpcaccel.runtime.compat.accelerator_files import SAMPLER_NAME as SAMPLER_NAME
from hpcaccel.runtime.compat.accelerator_files import SCALER_NAME as SCALER_NAME
from hpcaccel.runtime.compat.accelerator_files import SCHEDULER_NAME as SCHEDULER_NAME
from hpcaccel.runtime.compat.availability import are_libraries_initialized as are_libraries_initialized
from hpcaccel.runtime.compat.availability import check_cuda_fp8_capability as check_cuda_fp8_capability
from hpcaccel.runtime.compat.availability import check_os_kernel as check_os_kernel
from hpcaccel.runtime.compat.availability import compare_versions as compare_versions
from hpcaccel.runtime.compat.availability import deepspeed_required as deepspeed_required
from hpcaccel.runtime.compat.availability import get_current_device_type as get_current_device_type
from hpcaccel.runtime.compat.availability import is_4bit_bnb_available as is_4bit_bnb_available
from hpcaccel.runtime.compat.availability import is_8bit_bnb_available as is_8bit_bnb_available
from hpcaccel.runtime.compat.availability import is_aim_available as is_aim_available
from hpcaccel.runtime.compat.availability import is_amdsmi_available as is_amdsmi_available
from hpcaccel.runtime.compat.availability import is_bf16_available as is_bf16_available
from hpcaccel.runtime.compat.availability import (
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
)
from hpcaccel.runtime.compat.availability import is_bnb_available as is_bnb_available
from hpcaccel.runtime.compat.availability import is_boto3_available as is_boto3_available
from hpcaccel.runtime.compat.availability import is_clearml_available as is_clearml_available
from hpcaccel.runtime.compat.availability import is_comet_ml_available as is_comet_ml_available
from hpcaccel.runtime.compat.availability import is_cuda_available as is_cuda_available
from hpcaccel.runtime.compat.availability import is_datasets_available as is_datasets_available
from hpcaccel.runtime.compat.availability import is_deepspeed_available as is_deepspeed_available
from hpcaccel.runtime.compat.availability import is_dvclive_available as is_dvclive_available
from hpcaccel.runtime.compat.availability import is_fp8_available as is_fp8_available
from hpcaccel.runtime.compat.availability import is_fp16_available as is_fp16_available
from hpcaccel.runtime.compat.availability import is_habana_gaudi1 as is_habana_gaudi1
from hpcaccel.runtime.compat.availability import is_hpu_available as is_hpu_available
from hpcaccel.runtime.compat.availability import is_import_timer_available as is_import_timer_available
from hpcaccel.runtime.compat.availability import is_lomo_available as is_lomo_available
from hpcaccel.runtime.compat.availability import is_matplotlib_available as is_matplotlib_available
from hpcaccel.runtime.compat.availability import is_megatron_lm_available as is_megatron_lm_available
from hpcaccel.runtime.compat.availability import is_mlflow_available as is_mlflow_available
from hpcaccel.runtime.compat.availability import is_mlu_available as is_mlu_available
from hpcaccel.runtime.compat.availability import is_mps_available as is_mps_available
from hpcaccel.runtime.compat.availability import is_msamp_available as is_msamp_available
from hpcaccel.runtime.compat.availability import is_musa_available as is_musa_available
from hpcaccel.runtime.compat.availability import is_neuron_available as is_neuron_available
from hpcaccel.runtime.compat.availability import is_npu_available as is_npu_available
from hpcaccel.runtime.compat.availability import is_pandas_available as is_pandas_available
from hpcaccel.runtime.compat.availability import is_peft_available as is_peft_available
from hpcaccel.runtime.compat.availability import is_pippy_available as is_pippy_available
from hpcaccel.runtime.compat.availability import is_port_in_use as is_port_in_use
from hpcaccel.runtime.compat.availability import is_pynvml_available as is_pynvml_available
from hpcaccel.runtime.compat.availability import is_pytest_available as is_pytest_available
from hpcaccel.runtime.compat.availability import is_rich_available as is_rich_available
from hpcaccel.runtime.compat.availability import is_rocm_available as is_rocm_available
from hpcaccel.runtime.compat.availability import is_sagemaker_available as is_sagemaker_available
from hpcaccel.runtime.compat.availability import is_schedulefree_available as is_schedulefree_available
from hpcaccel.runtime.compat.availability import is_sdaa_available as is_sdaa_available
from hpcaccel.runtime.compat.availability import is_swanlab_available as is_swanlab_available
from hpcaccel.runtime.compat.availability import is_tensorboard_available as is_tensorboard_available
from hpcaccel.runtime.compat.availability import is_timm_available as is_timm_available
from hpcaccel.runtime.compat.availability import is_torch_version as is_torch_version
from hpcaccel.runtime.compat.availability import is_torch_xla_available as is_torch_xla_available
from hpcaccel.runtime.compat.availability import is_torchao_available as is_torchao_available
from hpcaccel.runtime.compat.availability import is_torchdata_available as is_torchdata_available
from hpcaccel.runtime.compat.availability import (
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from hpcaccel.runtime.compat.availability import is_torchvision_available as is_torchvision_available
from hpcaccel.runtime.compat.availability import is_tqdm_available as is_tqdm_available
from hpcaccel.runtime.compat.availability import is_trackio_available as is_trackio_available
from hpcaccel.runtime.compat.availability import is_transformer_engine_available as is_transformer_engine_available
from hpcaccel.runtime.compat.availability import (
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
)
from hpcaccel.runtime.compat.availability import is_transformers_available as is_transformers_available
from hpcaccel.runtime.compat.availability import is_triton_available as is_triton_available
from hpcaccel.runtime.compat.availability import is_wandb_available as is_wandb_available
from hpcaccel.runtime.compat.availability import is_weights_only_available as is_weights_only_available
from hpcaccel.runtime.compat.availability import is_xccl_available as is_xccl_available
from hpcaccel.runtime.compat.availability import is_xpu_available as is_xpu_available
from hpcaccel.runtime.compat.availability import torchao_required as torchao_required
from hpcaccel.runtime.compat.config_file import write_basic_config as write_basic_config
from hpcaccel.runtime.compat.fp8_layers import apply_fp8_autowrap as apply_fp8_autowrap
from hpcaccel.runtime.compat.fp8_layers import contextual_fp8_autocast as contextual_fp8_autocast
from hpcaccel.runtime.compat.fp8_layers import convert_model as convert_model
from hpcaccel.runtime.compat.fp8_layers import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from hpcaccel.runtime.compat.fp8_layers import (
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
)
from hpcaccel.runtime.compat.fp8_layers import filter_linear_layers as filter_linear_layers
from hpcaccel.runtime.compat.fp8_layers import find_first_last_linear_layers as find_first_last_linear_layers
from hpcaccel.runtime.compat.fp8_layers import has_ao_layers as has_ao_layers
from hpcaccel.runtime.compat.fp8_layers import has_transformer_engine_layers as has_transformer_engine_layers
from hpcaccel.runtime.compat.fsdp2 import compile_regions_deepspeed as compile_regions_deepspeed
from hpcaccel.runtime.compat.fsdp2 import compile_regions_fsdp2 as compile_regions_fsdp2
from hpcaccel.runtime.compat.fsdp2 import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
from hpcaccel.runtime.compat.fsdp2 import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
from hpcaccel.runtime.compat.fsdp2 import ensure_weights_retied as ensure_weights_retied
from hpcaccel.runtime.compat.fsdp2 import fsdp2_apply_ac as fsdp2_apply_ac
from hpcaccel.runtime.compat.fsdp2 import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from hpcaccel.runtime.compat.fsdp2 import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from hpcaccel.runtime.compat.fsdp2 import fsdp2_prepare_model as fsdp2_prepare_model
from hpcaccel.runtime.compat.fsdp2 import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
from hpcaccel.runtime.compat.fsdp2 import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from hpcaccel.runtime.compat.fsdp2 import get_model_tp_size as get_model_tp_size
from hpcaccel.runtime.compat.fsdp_checkpoint import load_fsdp_model as load_fsdp_model
from hpcaccel.runtime.compat.fsdp_checkpoint import load_fsdp_optimizer as load_fsdp_optimizer
from hpcaccel.runtime.compat.fsdp_checkpoint import merge_fsdp_weights as merge_fsdp_weights
from hpcaccel.runtime.compat.fsdp_checkpoint import save_fsdp_model as save_fsdp_model
from hpcaccel.runtime.compat.fsdp_checkpoint import save_fsdp_optimizer as save_fsdp_optimizer
from hpcaccel.runtime.compat.import_paths import find_in_utils as __getattr__  # noqa: F401
from hpcaccel.runtime.compat.introspection import calculate_maximum_sizes as calculate_maximum_sizes
from hpcaccel.runtime.compat.introspection import compute_module_sizes as compute_module_sizes
from hpcaccel.runtime.compat.introspection import convert_bytes as convert_bytes
from hpcaccel.runtime.compat.introspection import convert_file_size_to_int as convert_file_size_to_int
from hpcaccel.runtime.compat.introspection import dtype_byte_size as dtype_byte_size
from hpcaccel.runtime.compat.introspection import find_tied_parameters as find_tied_parameters
from hpcaccel.runtime.compat.introspection import get_module_children_bottom_up as get_module_children_bottom_up
from hpcaccel.runtime.compat.introspection import get_pretty_name as get_pretty_name
from hpcaccel.runtime.compat.introspection import has_compiled_regions as has_compiled_regions
from hpcaccel.runtime.compat.introspection import id_tensor_storage as id_tensor_storage
from hpcaccel.runtime.compat.introspection import is_compiled_module as is_compiled_module
from hpcaccel.runtime.compat.introspection import is_peft_model as is_peft_model
from hpcaccel.runtime.compat.introspection import merge_dicts as merge_dicts
from hpcaccel.runtime.compat.introspection import model_has_dtensor as model_has_dtensor
from hpcaccel.runtime.compat.introspection import named_module_tensors as named_module_tensors
from hpcaccel.runtime.compat.introspection import recursive_getattr as recursive_getattr
from hpcaccel.runtime.compat.introspection import retie_parameters as retie_parameters
from hpcaccel.runtime.compat.launched_process import TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS
from hpcaccel.runtime.compat.launched_process import PrepareForLaunch as PrepareForLaunch
from hpcaccel.runtime.compat.launched_process import get_cpu_distributed_information as get_cpu_distributed_information
from hpcaccel.runtime.compat.launched_process import purge_accelerate_environment as purge_accelerate_environment
from hpcaccel.runtime.compat.out_of_memory import clear_device_cache as clear_device_cache
from hpcaccel.runtime.compat.out_of_memory import find_executable_batch_size as find_executable_batch_size
from hpcaccel.runtime.compat.out_of_memory import release_memory as release_memory
from hpcaccel.runtime.compat.standalone import compile_regions as compile_regions
from hpcaccel.runtime.compat.standalone import extract_model_from_parallel as extract_model_from_parallel
from hpcaccel.runtime.compat.standalone import (
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from hpcaccel.runtime.compat.standalone import load as load
from hpcaccel.runtime.compat.standalone import save as save
from hpcaccel.runtime.compat.tpu_setup import install_xla as install_xla
from hpcaccel.runtime.compat.tpu_setup import prepare_tpu as prepare_tpu
from hpcaccel.runtime.deepspeed.engine_wrappers import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from hpcaccel.runtime.deepspeed.engine_wrappers import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from hpcaccel.runtime.deepspeed.engine_wrappers import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from hpcaccel.runtime.deepspeed.engine_wrappers import DummyOptim as DummyOptim
from hpcaccel.runtime.deepspeed.engine_wrappers import DummyScheduler as DummyScheduler
from hpcaccel.runtime.deepspeed.engine_wrappers import GatheredParameters as GatheredParameters
from hpcaccel.runtime.deepspeed.engine_wrappers import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
from hpcaccel.runtime.deepspeed.json_config import HfDeepSpeedConfig as HfDeepSpeedConfig
from hpcaccel.runtime.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from hpcaccel.runtime.deepspeed.plugin_choice import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from hpcaccel.runtime.distributed.collectives.functions import broadcast as broadcast
from hpcaccel.runtime.distributed.collectives.functions import broadcast_object_list as broadcast_object_list
from hpcaccel.runtime.distributed.collectives.functions import copy_tensor_to_devices as copy_tensor_to_devices
from hpcaccel.runtime.distributed.collectives.functions import gather as gather
from hpcaccel.runtime.distributed.collectives.functions import gather_object as gather_object
from hpcaccel.runtime.distributed.collectives.functions import pad_across_processes as pad_across_processes
from hpcaccel.runtime.distributed.collectives.functions import reduce as reduce
from hpcaccel.runtime.distributed.collectives.functions import wait_for_everyone as wait_for_everyone
from hpcaccel.runtime.distributed.collectives.nested_ops import TensorInformation as TensorInformation
from hpcaccel.runtime.distributed.collectives.nested_ops import concatenate as concatenate
from hpcaccel.runtime.distributed.collectives.nested_ops import convert_outputs_to_fp32 as convert_outputs_to_fp32
from hpcaccel.runtime.distributed.collectives.nested_ops import convert_to_fp32 as convert_to_fp32
from hpcaccel.runtime.distributed.collectives.nested_ops import find_batch_size as find_batch_size
from hpcaccel.runtime.distributed.collectives.nested_ops import find_device as find_device
from hpcaccel.runtime.distributed.collectives.nested_ops import get_data_structure as get_data_structure
from hpcaccel.runtime.distributed.collectives.nested_ops import ignorant_find_batch_size as ignorant_find_batch_size
from hpcaccel.runtime.distributed.collectives.nested_ops import initialize_tensors as initialize_tensors
from hpcaccel.runtime.distributed.collectives.nested_ops import is_tensor_information as is_tensor_information
from hpcaccel.runtime.distributed.collectives.nested_ops import listify as listify
from hpcaccel.runtime.distributed.collectives.nested_ops import send_to_device as send_to_device
from hpcaccel.runtime.distributed.collectives.nested_ops import slice_tensors as slice_tensors
from hpcaccel.runtime.distributed.collectives.nested_tensors import honor_type as honor_type
from hpcaccel.runtime.distributed.collectives.nested_tensors import is_namedtuple as is_namedtuple
from hpcaccel.runtime.distributed.collectives.nested_tensors import is_torch_tensor as is_torch_tensor
from hpcaccel.runtime.distributed.collectives.nested_tensors import recursively_apply as recursively_apply
from hpcaccel.runtime.distributed.collectives.padding import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
)
from hpcaccel.runtime.distributed.collectives.padding import pad_input_tensors as pad_input_tensors
from hpcaccel.runtime.distributed.gpu_affinity import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from hpcaccel.runtime.distributed.gpu_affinity import get_gpu_info as get_gpu_info
from hpcaccel.runtime.distributed.gpu_affinity import override_numa_affinity as override_numa_affinity
from hpcaccel.runtime.distributed.gpu_affinity import set_numa_affinity as set_numa_affinity
from hpcaccel.runtime.enums import ComputeEnvironment as ComputeEnvironment
from hpcaccel.runtime.enums import CustomDtype as CustomDtype
from hpcaccel.runtime.enums import DDPCommunicationHookType as DDPCommunicationHookType
from hpcaccel.runtime.enums import DistributedType as DistributedType
from hpcaccel.runtime.enums import DynamoBackend as DynamoBackend
from hpcaccel.runtime.enums import LoggerType as LoggerType
from hpcaccel.runtime.enums import PrecisionType as PrecisionType
from hpcaccel.runtime.enums import RNGType as RNGType
from hpcaccel.runtime.handlers import AORecipeKwargs as AORecipeKwargs
from hpcaccel.runtime.handlers import AutocastKwargs as AutocastKwargs
from hpcaccel.runtime.handlers import DataLoaderConfiguration as DataLoaderConfiguration
from hpcaccel.runtime.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from hpcaccel.runtime.handlers import FP8RecipeKwargs as FP8RecipeKwargs
from hpcaccel.runtime.handlers import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from hpcaccel.runtime.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
from hpcaccel.runtime.handlers import GradScalerKwargs as GradScalerKwargs
from hpcaccel.runtime.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from hpcaccel.runtime.handlers import KwargsHandler as KwargsHandler
from hpcaccel.runtime.handlers import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from hpcaccel.runtime.handlers import ProfileKwargs as ProfileKwargs
from hpcaccel.runtime.handlers import ProjectConfiguration as ProjectConfiguration
from hpcaccel.runtime.handlers import TERecipeKwargs as TERecipeKwargs
from hpcaccel.runtime.handlers import TorchDynamoPlugin as TorchDynamoPlugin
from hpcaccel.runtime.handlers import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from hpcaccel.runtime.launch_env import clear_environment as clear_environment
from hpcaccel.runtime.launch_env import convert_dict_to_env_variables as convert_dict_to_env_variables
from hpcaccel.runtime.launch_env import get_int_from_env as get_int_from_env
from hpcaccel.runtime.launch_env import parse_choice_from_env as parse_choice_from_env
from hpcaccel.runtime.launch_env import parse_flag_from_env as parse_flag_from_env
from hpcaccel.runtime.launch_env import patch_environment as patch_environment
from hpcaccel.runtime.launch_env import str_to_bool as str_to_bool
from hpcaccel.runtime.offload.aligned_devices import align_module_device as align_module_device
from hpcaccel.runtime.offload.aligned_devices import has_offloaded_params as has_offloaded_params
from hpcaccel.runtime.offload.device_map import clean_device_map as clean_device_map
from hpcaccel.runtime.offload.device_map import infer_auto_device_map as infer_auto_device_map
from hpcaccel.runtime.offload.device_memory import get_balanced_memory as get_balanced_memory
from hpcaccel.runtime.offload.device_memory import get_max_memory as get_max_memory
from hpcaccel.runtime.offload.model_parts import check_device_map as check_device_map
from hpcaccel.runtime.offload.model_parts import check_tied_parameters_in_config as check_tied_parameters_in_config
from hpcaccel.runtime.offload.model_parts import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
)
from hpcaccel.runtime.offload.model_parts import compute_module_total_buffer_size as compute_module_total_buffer_size
from hpcaccel.runtime.offload.model_parts import get_max_layer_size as get_max_layer_size
from hpcaccel.runtime.offload.model_parts import get_module_size_with_ties as get_module_size_with_ties
from hpcaccel.runtime.offload.offloaded_state import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from hpcaccel.runtime.offload.quantized_layers import BnbQuantizationConfig as BnbQuantizationConfig
from hpcaccel.runtime.offload.quantized_layers import get_keys_to_not_convert as get_keys_to_not_convert
from hpcaccel.runtime.offload.quantized_layers import has_4bit_bnb_layers as has_4bit_bnb_layers
from hpcaccel.runtime.offload.quantized_layers import replace_with_bnb_layers as replace_with_bnb_layers
from hpcaccel.runtime.offload.tensor_placement import get_non_persistent_buffers as get_non_persistent_buffers
from hpcaccel.runtime.offload.tensor_placement import load_offloaded_weights as load_offloaded_weights
from hpcaccel.runtime.offload.tensor_placement import set_module_tensor_to_device as set_module_tensor_to_device
from hpcaccel.runtime.offload.weight_store import OffloadedWeightsLoader as OffloadedWeightsLoader
from hpcaccel.runtime.offload.weight_store import PrefixedDataset as PrefixedDataset
from hpcaccel.runtime.offload.weight_store import extract_submodules_state_dict as extract_submodules_state_dict
from hpcaccel.runtime.offload.weight_store import load_offloaded_weight as load_offloaded_weight
from hpcaccel.runtime.offload.weight_store import offload_state_dict as offload_state_dict
from hpcaccel.runtime.offload.weight_store import offload_weight as offload_weight
from hpcaccel.runtime.offload.weight_store import save_offload_index as save_offload_index
from hpcaccel.runtime.parallelism_config import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from hpcaccel.runtime.parallelism_config import ParallelismConfig as ParallelismConfig
from hpcaccel.runtime.parallelism_config import TorchContextParallelConfig as TorchContextParallelConfig
from hpcaccel.runtime.parallelism_config import TorchTensorParallelConfig as TorchTensorParallelConfig
from hpcaccel.runtime.rank_logger import tqdm as tqdm
from hpcaccel.runtime.rng.determinism import set_seed as set_seed
from hpcaccel.runtime.rng.generators import synchronize_rng_state as synchronize_rng_state
from hpcaccel.runtime.rng.generators import synchronize_rng_states as synchronize_rng_states
from hpcaccel.runtime.training.scaling import get_grad_scaler as get_grad_scaler
from hpcaccel.utils.constants import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from hpcaccel.utils.constants import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
)
from hpcaccel.utils.constants import TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES
from hpcaccel.utils.constants import XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
