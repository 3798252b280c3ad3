"""Accelerate's constants: the versions from which other packages have a feature, and lists of names."""

from __future__ import annotations

__all__ = [
    "BETA_CP_AVAILABLE_PYTORCH_VERSION",
    "BETA_SP_AVAILABLE_DEEPSPEED_VERSION",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
    "CUDA_DISTRIBUTED_TYPES",
    "DEEPSPEED_MULTINODE_LAUNCHERS",
    "DTENSOR_PYTORCH_VERSION",
    "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION",
    "FSDP2_PYTORCH_VERSION",
    "FSDP2_STATE_DICT_TYPE",
    "FSDP_PYTORCH_VERSION",
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
    "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "TORCH_DYNAMO_MODES",
    "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
]

# First versions of torch. hpcaccel needs torch 2.6, which has all of these features.
FSDP_PYTORCH_VERSION = "2.1.0.a0+32f93b1"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"
BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"
DTENSOR_PYTORCH_VERSION = "2.5.0"
BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
FSDP2_PYTORCH_VERSION = "2.6.0"

# First versions of other packages.
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"

CUDA_DISTRIBUTED_TYPES = ["DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP"]
"""Types in which each rank may have a GPU. MEGATRON_LM and TP are Accelerate's only."""
TORCH_DISTRIBUTED_OPERATION_TYPES = [
    *CUDA_DISTRIBUTED_TYPES,
    *("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_CPU", "MULTI_HPU", "MULTI_NEURON"),
]
"""Types with several ranks, whose collectives are those of torch."""
TORCH_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune"]
"""Modes of ``torch.compile``."""
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
"""Values of ``FSDP_STATE_DICT_TYPE`` that exist for FSDP2. The first one is the default of Accelerate."""
DEEPSPEED_MULTINODE_LAUNCHERS = ["pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"]
"""Names of the launchers that a configuration file of Accelerate may select for DeepSpeed on several nodes."""
