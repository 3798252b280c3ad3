"""The options of a launch. Command-line flags override the configuration file, which overrides the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcaccel.errors import UserError
from hpcaccel.launch.arguments import Arguments
from hpcaccel.launch.config_sections import typed
from hpcaccel.launch.flags import spelled
from hpcaccel.launch.launch_config import LaunchConfig

__all__ = ["flag", "merge", "notes"]

_PARADIGMS = ("cpu", "multi_gpu", "tpu", "use_fsdp", "use_deepspeed")
"""Flags that choose how to train. If one of them is given, the file's ``distributed_type`` does not count."""
_PLACE = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend",
         "same_network", "gpu_ids")  # fmt: skip
"""Keys of the file that describe machines. They are ignored inside a Slurm allocation."""
_SECTIONS = ("fsdp_config", "deepspeed_config", "dynamo_config", "parallelism_config", "fp8_config", "mpirun_config")
_TOP = ("mixed_precision", "debug", "main_training_function", "enable_cpu_affinity", "downcast_bf16")
_EXCLUDE_EACH_OTHER = (
    ("cpu", "multi_gpu"), ("cpu", "tpu"), ("multi_gpu", "tpu"), ("use_fsdp", "use_deepspeed"), ("use_fsdp", "tpu"),
    ("use_deepspeed", "tpu"), ("module", "no_python"), ("num_machines", "nnodes"), ("standalone", "nnodes"),
    ("standalone", "num_machines"), ("run_path", "no_python"), ("run_path", "module"),
)  # fmt: skip
_SWITCHES_OFF = (
    ("multi_gpu", "cpu"), ("tpu", "cpu"), ("use_fsdp", "use_deepspeed"), ("use_deepspeed", "use_fsdp")
)  # fmt: skip
"""Options that exclude another one, which an environment variable might still request."""
_PODS = ("tpu_cluster", "tpu_use_sudo", "vm", "env")
_DEEPSPEED_LAUNCHER = ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter")
_ONLY_WITH = {
    "fsdp_": "use_fsdp",
    "zero_stage": "use_deepspeed",
    "offload_": "use_deepspeed",
    "zero3_": "use_deepspeed",
    "deepspeed_": "use_deepspeed",
}
"""Flags, by the beginning of their name, that have an effect only with another one."""


def merge(arguments: Arguments, config: LaunchConfig | None, *, in_allocation: bool) -> dict[str, Any]:
    """All options by the name of their flag; those that neither the command line nor the file gives are absent.

    A switch that is off is False, so that it overrides the environment.

    Args:
        in_allocation: whether to ignore the file's settings about machines.

    Raises:
        UserError: options that exclude each other, or that hpcaccel does not support, with the reason.
    """
    given = dict(arguments.values)
    for one, other in _EXCLUDE_EACH_OTHER:
        if given.get(one) and given.get(other):
            raise UserError(f"{spelled(one)} and {spelled(other)} exclude each other")
    options = {} if config is None else _of_file(config, given, in_allocation=in_allocation)
    options |= given
    if "nnodes" in given:
        options.pop("num_machines", None)
    for chosen, other in _SWITCHES_OFF:
        if options.get(chosen):
            options.setdefault(other, False)
    _refuse_unsupported(options)
    return options


def flag(options: Mapping[str, Any], name: str) -> str:
    """An option as the user would write it, for messages."""
    return f"{spelled(name)} {options[name]}"


def notes(given: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Sentences about flags of the command line that have no effect."""
    found = []
    for start, other in _ONLY_WITH.items():
        idle = [spelled(name) for name in given if name.startswith(start)]
        if idle and not options.get(other):
            found.append(f"{', '.join(idle)} without {spelled(other)}: no effect")
    if given.get("gpu_ids", "all") != "all" and options.get("cpu"):
        found.append("--gpu-ids with --cpu: no effect")
    if any(name.startswith("fp8_") for name in given) and options.get("mixed_precision") != "fp8":
        found.append("--fp8-* without --mixed-precision fp8: no effect")
    return found


def _of_file(config: LaunchConfig, given: Mapping[str, Any], *, in_allocation: bool) -> dict[str, Any]:
    options = {name: getattr(config, name) for name in (*_TOP, *(() if in_allocation else _PLACE))}
    for section in _SECTIONS:
        options |= typed(getattr(config, section))
    options["tpu_cluster"] = config.tpu_use_cluster or None
    if options.get("num_processes") == -1:
        del options["num_processes"]  # "given on the command line"
    kind = config.distributed_type or "NO"
    if kind == "MEGATRON_LM" or config.megatron_lm_config:
        options["use_megatron_lm"] = True
    if not any(given.get(name) for name in _PARADIGMS):
        options |= {
            "cpu": kind == "MULTI_CPU" or config.use_cpu,
            "multi_gpu": kind == "MULTI_GPU" or None,
            "multi_device": kind.startswith("MULTI_") or None,
            "tpu": kind == "XLA" or None,
            "use_fsdp": kind == "FSDP" if config.distributed_type else None,
            "use_deepspeed": kind == "DEEPSPEED" if config.distributed_type else None,
        }
        if config.distributed_type == "NO" and not in_allocation and options.get("num_processes", -1) is None:
            options["num_processes"] = 1
    elif config.distributed_type == "NO" and not given.get("cpu"):
        options["num_processes"] = None  # the number for a single device
    sizes = [value for name, value in typed(config.parallelism_config).items() if name.endswith("_size")]
    if any(value != 1 for value in sizes):
        options["use_parallelism_config"] = True
    return {name: value for name, value in options.items() if value is not None}


def _refuse_unsupported(options: Mapping[str, Any]) -> None:
    if options.get("use_megatron_lm"):
        raise UserError(
            "distributed_type MEGATRON_LM: hpcaccel does not support Megatron-LM. Use FSDP, and tensor parallelism "
            "with --parallelism-config-tp-size"
        )
    pods = [spelled(name) for name in _PODS if options.get(name)]
    if pods:
        raise UserError(
            f"{', '.join(pods)}: hpcaccel does not start programs on TPU pods. Start `hpcaccel launch --tpu` on each "
            "worker, for example with gcloud compute tpus tpu-vm ssh --worker=all"
        )
    several = str(options.get("nnodes", options.get("num_machines", 1))) not in ("1", "1:1")
    launcher = options.get("deepspeed_multinode_launcher", "standard")
    runner = [flag(options, name) for name in _DEEPSPEED_LAUNCHER if options.get(name)]
    if several and options.get("use_deepspeed") and (runner or launcher not in ("standard", "torchrun", "slurm")):
        what = ", ".join([*runner, *([] if launcher == "standard" else [f"--deepspeed-multinode-launcher {launcher}"])])
        raise UserError(
            f"{what}: hpcaccel does not use DeepSpeed's own launcher. Inside a Slurm allocation, `hpcaccel launch` "
            "starts the ranks of all machines; elsewhere, start it on each machine, with --machine-rank, "
            "--main-process-ip and --deepspeed-multinode-launcher standard"
        )
