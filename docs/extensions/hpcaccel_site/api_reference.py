"""The Python API: the public names of hpcaccel, in groups. Their docstrings are shown by autodoc."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import hpcaccel

__all__ = ["GROUPS", "grouped_names", "public_names"]

GROUPS: Mapping[str, tuple[str, Sequence[str]]] = {
    "Submit and runs": (
        "On a login node, on a laptop, or in a notebook; torch is not imported.",
        ("submit", "map", "find_run", "Run", "hpcaccel.submission.RunArray", "load_spec", "JobSpec", "HpcaccelError"),
    ),
    "Sweeps": ("", ("sweep", "Sweep")),
    "Service client": ("", ("Client",)),
    "Training loop": (
        "In a training script.",
        ("Accelerator", "PartialState", "AcceleratorState", "GradientState", "is_initialized", "skip_first_batches",
         "PermutationSampler", "LocalSGD", "find_executable_batch_size", "set_seed", "synchronize_rng_states"),
    ),
    "Any program of a run": (
        "Without an `Accelerator`, and without torch.",
        ("log", "should_stop", "stop_gate", "StopGate", "ResultsFile"),
    ),
    "Checkpoints and models": (
        "",
        ("load_sharded", "load_checkpoint_and_dispatch", "load_checkpoint_in_model", "init_empty_weights",
         "init_on_device", "infer_auto_device_map", "dispatch_model", "cpu_offload", "cpu_offload_with_hook",
         "disk_offload", "prepare_pippy"),
    ),
    "Launch": ("", ("notebook_launcher", "debug_launcher")),
    "Settings": (
        "Arguments of `Accelerator`.",
        ("ProjectConfiguration", "DataLoaderConfiguration", "GradientAccumulationPlugin", "AutocastKwargs",
         "DistributedDataParallelKwargs", "GradScalerKwargs", "InitProcessGroupKwargs", "ProfileKwargs",
         "FullyShardedDataParallelPlugin", "DeepSpeedPlugin", "ParallelismConfig", "TorchTensorParallelPlugin",
         "TorchTensorParallelConfig", "TorchDynamoPlugin", "AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs",
         "FP8RecipeKwargs", "DDPCommunicationHookType", "DistributedType", "DynamoBackend", "LoggerType",
         "PrecisionType", "RNGType"),
    ),
    "Utils": (
        "Collectives over nested values, loggers, trackers. `hpcaccel.utils` has Accelerate's further names.",
        ("gather", "gather_object", "broadcast", "broadcast_object_list", "reduce", "pad_across_processes",
         "wait_for_everyone", "get_logger", "GeneralTracker", "is_rich_available"),
    ),
}  # fmt: skip
"""Title, introduction and names of each group. Names of other modules are written in full."""


def grouped_names() -> list[str]:
    """All names of the groups."""
    return [name for _, names in GROUPS.values() for name in names]


def public_names() -> str:
    """Markdown: a section for each group, with autodoc's directives."""
    parts = []
    for title, (about, names) in GROUPS.items():
        directives = "\n".join(map(_directive, names))
        parts.append(f"## {title}\n\n{about}\n\n```{{eval-rst}}\n{directives}\n```\n")
    return "\n".join(parts)


def _directive(name: str) -> str:
    full = name if "." in name else f"hpcaccel.{name}"
    module, _, attribute = full.rpartition(".")
    value = getattr(hpcaccel if module == "hpcaccel" else __import__(module, fromlist=[attribute]), attribute)
    if not inspect.isclass(value):
        return f".. autofunction:: {full}\n"
    options = [":members:", ":inherited-members: Exception, object, BaseModel, Enum, str", ":show-inheritance:"]
    return f".. autoclass:: {full}\n" + "".join(f"   {one}\n" for one in options)
