"""Accelerate's names that hpcaccel does not have: the reason for each, and the replacement.

The modules with Accelerate's import paths take their ``__getattr__`` from here, so that the error of
``from hpcaccel.utils import MegatronLMPlugin`` gives the reason.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["REASONS", "refuse", "why"]

_REASONS = {
    "Megatron-LM is not supported: strategy='fsdp' and ParallelismConfig(tp_size=...) with a tp_plan shard large "
    "models": """
        AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader MegatronLMDummyScheduler
        MegatronLMOptimizerWrapper MegatronLMPlugin MegatronLMSchedulerWrapper T5TrainStep
        add_model_config_to_megatron_parser avg_losses_across_data_parallel_group gather_across_data_parallel_groups
        megatron_lm_initialize megatron_lm_prepare_data_loader megatron_lm_prepare_model_optimizer_scheduler
        megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler""",
    "SageMaker is not supported: `hpcaccel submit` submits jobs to Slurm": """
        SageMakerDistributedType prepare_sagemager_args_inputs SAGEMAKER_PARALLEL_EC2_INSTANCES
        SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION SAGEMAKER_TRANSFORMERS_VERSION""",
    "It lists values of FSDP1, which FSDP2 does not have: models are sharded with FSDP2": """
        FSDP_BACKWARD_PREFETCH FSDP_STATE_DICT_TYPE""",
}

REASONS = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Reasons by name."""


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
