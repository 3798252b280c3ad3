"""Submit PyTorch training to Slurm from one YAML file, and resume it after preemption.

The names below are the public API. Each is imported on first use, so that ``import hpcaccel`` is fast on a login node
and does not import torch. Most names for training scripts are those of Accelerate: see ``docs/migration.md``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcaccel.errors import HpcaccelError as HpcaccelError
    from hpcaccel.runtime.accelerator import Accelerator as Accelerator
    from hpcaccel.runtime.batch_inference.results_file import ResultsFile as ResultsFile
    from hpcaccel.runtime.checkpointing.mapped_load import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from hpcaccel.runtime.checkpointing.mapped_load import load_checkpoint_in_model as load_checkpoint_in_model
    from hpcaccel.runtime.checkpointing.sharded_load import load_sharded as load_sharded
    from hpcaccel.runtime.compat.availability import is_rich_available as is_rich_available
    from hpcaccel.runtime.compat.out_of_memory import find_executable_batch_size as find_executable_batch_size
    from hpcaccel.runtime.data.batch_samplers import skip_first_batches as skip_first_batches
    from hpcaccel.runtime.data.permutation import PermutationSampler as PermutationSampler
    from hpcaccel.runtime.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
    from hpcaccel.runtime.distributed.collectives.functions import broadcast as broadcast
    from hpcaccel.runtime.distributed.collectives.functions import broadcast_object_list as broadcast_object_list
    from hpcaccel.runtime.distributed.collectives.functions import gather as gather
    from hpcaccel.runtime.distributed.collectives.functions import gather_object as gather_object
    from hpcaccel.runtime.distributed.collectives.functions import pad_across_processes as pad_across_processes
    from hpcaccel.runtime.distributed.collectives.functions import reduce as reduce
    from hpcaccel.runtime.distributed.collectives.functions import wait_for_everyone as wait_for_everyone
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
    from hpcaccel.runtime.handlers import MSAMPRecipeKwargs as MSAMPRecipeKwargs
    from hpcaccel.runtime.handlers import ProfileKwargs as ProfileKwargs
    from hpcaccel.runtime.handlers import ProjectConfiguration as ProjectConfiguration
    from hpcaccel.runtime.handlers import TERecipeKwargs as TERecipeKwargs
    from hpcaccel.runtime.handlers import TorchDynamoPlugin as TorchDynamoPlugin
    from hpcaccel.runtime.handlers import TorchTensorParallelPlugin as TorchTensorParallelPlugin
    from hpcaccel.runtime.local_launch import debug_launcher as debug_launcher
    from hpcaccel.runtime.local_launch import notebook_launcher as notebook_launcher
    from hpcaccel.runtime.offload.device_map import infer_auto_device_map as infer_auto_device_map
    from hpcaccel.runtime.offload.dispatch import cpu_offload as cpu_offload
    from hpcaccel.runtime.offload.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
    from hpcaccel.runtime.offload.dispatch import disk_offload as disk_offload
    from hpcaccel.runtime.offload.dispatch import dispatch_model as dispatch_model
    from hpcaccel.runtime.parallel.meta_device import init_empty_weights as init_empty_weights
    from hpcaccel.runtime.parallel.meta_device import init_on_device as init_on_device
    from hpcaccel.runtime.parallelism_config import ParallelismConfig as ParallelismConfig
    from hpcaccel.runtime.parallelism_config import TorchTensorParallelConfig as TorchTensorParallelConfig
    from hpcaccel.runtime.pipeline.pipelining import prepare_pippy as prepare_pippy
    from hpcaccel.runtime.rank_logger import get_logger as get_logger
    from hpcaccel.runtime.rng.determinism import set_seed as set_seed
    from hpcaccel.runtime.rng.generators import (
        synchronize_rng_states as synchronize_rng_states,
    )
    from hpcaccel.runtime.script_api import log as log
    from hpcaccel.runtime.script_api import should_stop as should_stop
    from hpcaccel.runtime.states.accelerator_state import AcceleratorState as AcceleratorState
    from hpcaccel.runtime.states.accelerator_state import is_initialized as is_initialized
    from hpcaccel.runtime.states.gradient_state import GradientState as GradientState
    from hpcaccel.runtime.states.partial_state import PartialState as PartialState
    from hpcaccel.runtime.tracking.general_tracker import GeneralTracker as GeneralTracker
    from hpcaccel.runtime.training.gradient_sync import LocalSGD as LocalSGD
    from hpcaccel.runtime.training.stop_gate import StopGate as StopGate
    from hpcaccel.runtime.training.stop_gate import stop_gate as stop_gate
    from hpcaccel.service.client import Client as Client
    from hpcaccel.spec import JobSpec as JobSpec
    from hpcaccel.spec import load_spec as load_spec
    from hpcaccel.submission import Run as Run
    from hpcaccel.submission import find_run as find_run
    from hpcaccel.submission.submit.api import map as map
    from hpcaccel.submission.submit.api import submit as submit
    from hpcaccel.sweeps.sweep_handle import Sweep as Sweep
    from hpcaccel.sweeps.sweep_handle import sweep as sweep

__version__ = "0.1.0"

_NAMES = {
    # Runs, from the login node
    "hpcaccel.errors": "HpcaccelError",
    "hpcaccel.spec": "JobSpec load_spec",
    "hpcaccel.submission": "Run find_run",
    "hpcaccel.submission.submit.api": "map submit",
    "hpcaccel.sweeps.sweep_handle": "Sweep sweep",
    "hpcaccel.service.client": "Client",
    # In a training script
    "hpcaccel.runtime.accelerator": "Accelerator",
    "hpcaccel.runtime.states.accelerator_state": "AcceleratorState is_initialized",
    "hpcaccel.runtime.states.gradient_state": "GradientState",
    "hpcaccel.runtime.states.partial_state": "PartialState",
    # In any Python program that a run starts
    "hpcaccel.runtime.script_api": "log should_stop",
    "hpcaccel.runtime.training.stop_gate": "StopGate stop_gate",
    "hpcaccel.runtime.batch_inference.results_file": "ResultsFile",
    # Settings
    "hpcaccel.runtime.handlers": """
        AORecipeKwargs AutocastKwargs DataLoaderConfiguration DistributedDataParallelKwargs
        FP8RecipeKwargs FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin
        InitProcessGroupKwargs MSAMPRecipeKwargs ProfileKwargs
        ProjectConfiguration TERecipeKwargs TorchDynamoPlugin TorchTensorParallelPlugin""",
    "hpcaccel.runtime.parallelism_config": "ParallelismConfig TorchTensorParallelConfig",
    "hpcaccel.runtime.deepspeed.plugin": "DeepSpeedPlugin",
    "hpcaccel.runtime.enums": """
        DDPCommunicationHookType DistributedType DynamoBackend LoggerType PrecisionType RNGType""",
    # Data
    "hpcaccel.runtime.data.permutation": "PermutationSampler",
    "hpcaccel.runtime.data.batch_samplers": "skip_first_batches",
    # Models
    "hpcaccel.runtime.parallel.meta_device": "init_empty_weights init_on_device",
    "hpcaccel.runtime.checkpointing.mapped_load": "load_checkpoint_and_dispatch load_checkpoint_in_model",
    "hpcaccel.runtime.offload.device_map": "infer_auto_device_map",
    "hpcaccel.runtime.offload.dispatch": "cpu_offload cpu_offload_with_hook disk_offload dispatch_model",
    "hpcaccel.runtime.checkpointing.sharded_load": "load_sharded",
    "hpcaccel.runtime.pipeline.pipelining": "prepare_pippy",
    # Collectives and random generators
    "hpcaccel.runtime.distributed.collectives.functions": """
        broadcast broadcast_object_list gather gather_object pad_across_processes reduce
        wait_for_everyone""",
    "hpcaccel.runtime.training.gradient_sync": "LocalSGD",
    "hpcaccel.runtime.compat.out_of_memory": "find_executable_batch_size",
    "hpcaccel.runtime.rng.determinism": "set_seed",
    "hpcaccel.runtime.rng.generators": "synchronize_rng_states",
    # Logging and tracking
    "hpcaccel.runtime.rank_logger": "get_logger",
    "hpcaccel.runtime.tracking.general_tracker": "GeneralTracker",
    # Launchers
    "hpcaccel.runtime.local_launch": "debug_launcher notebook_launcher",
    "hpcaccel.runtime.compat.availability": "is_rich_available",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}

_PAGES = (
    "accelerator", "big_modeling", "checkpointing", "commands", "data_loader", "hooks", "inference", "launchers",
    "local_sgd", "logging", "memory_utils", "optimizer", "parallelism_config", "scheduler", "state", "test_utils",
    "tracking", "utils",
)  # fmt: skip
"""Modules under Accelerate's import paths. They are also attributes of this package."""

_ABSENT = ("rich",)
"""Names that Accelerate exports and hpcaccel does not support. Accessing one raises an error that gives the reason."""

_EXTRA = {"numpy": "train", "torch": "train"}
"""Maps each optional dependency to the extra of hpcaccel that installs it."""

__all__ = sorted({*_HOME} - {"map"})  # noqa: PLE0605 - a star import must not hide the builtin


def __getattr__(name: str) -> Any:
    if name in _PAGES:
        return import_module(f"hpcaccel.{name}")
    if name == "rich":  # not in dir(hpcaccel): this import changes how tracebacks are printed
        return import_module("hpcaccel.utils.rich")
    if name in _ABSENT:
        import_module("hpcaccel.runtime.compat.unsupported").refuse(name)
    if name not in _HOME:  # during a subpackage's first import, Python looks it up here and handles this error
        raise AttributeError(f"module 'hpcaccel' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        raise ModuleNotFoundError(
            f"hpcaccel.{name} needs {error.name}, which is not installed for {sys.executable}: "
            f"pip install 'hpcaccel[{_EXTRA[error.name]}]'",
            name=error.name,
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_PAGES])
