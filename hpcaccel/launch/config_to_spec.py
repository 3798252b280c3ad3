"""A job spec with the settings of Accelerate's configuration file."""

from __future__ import annotations

import json
import math
from typing import Any

from hpcaccel.core.formatting import clean
from hpcaccel.launch.config_sections import typed
from hpcaccel.launch.launch_config import LaunchConfig

__all__ = ["to_spec"]

_COMMAND = """\
  # Put your training script here instead:
  # script: train.py
  # args: {lr: 3.0e-4}
  command: [echo, "hello from a rank"]"""
_FOUND_BY_THEMSELVES = ("main_process_ip", "main_process_port", "machine_rank", "rdzv_backend", "same_network")
_NO_FIELD = {
    "gpu_ids": "Slurm chooses the GPUs of each node",
    "enable_cpu_affinity": "set slurm.gpu_bind",
    "mpirun_config": "ranks are started by srun",
    "fp8_config": "Accelerator(kwargs_handlers=[...]) in the script chooses the FP8 library's settings",
    "megatron_lm_config": "Megatron-LM is not supported",
    "tpu_name": "a Slurm job has no TPU pod", "tpu_zone": "a Slurm job has no TPU pod",
    "tpu_env": "set environment.env", "tpu_vm": "a Slurm job has no TPU pod",
    "commands": "set environment.setup", "command_file": "set environment.setup",
}  # fmt: skip
"""Keys without a counterpart, each with what to do instead. They are left out if they have no value."""
_FSDP_FIELDS = {"fsdp_reshard_after_forward", "fsdp_offload_params", "fsdp_transformer_layer_cls_to_wrap",
                "fsdp_activation_checkpointing", "fsdp_version", "fsdp_auto_wrap_policy", "fsdp_state_dict_type",
                "fsdp_sharding_strategy"}  # fmt: skip
_DYNAMO_FIELDS = {"dynamo_backend"}
_DEEPSPEED_FIELDS = {"deepspeed_config_file", "zero_stage", "gradient_accumulation_steps", "gradient_clipping",
                     "offload_optimizer_device", "offload_param_device"}  # fmt: skip
_SHARDING = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
"""Accelerate's numbers for sharding strategies."""
_ZERO_OFF = (None, "none", "None")


class _Lines:
    """Settings and comments of a section."""

    def __init__(self) -> None:
        self.settings: list[str] = []
        self.comments: list[str] = []

    def set(self, key: str, value: Any, *, indent: int = 2) -> None:
        self.settings.append(f"{' ' * indent}{key}: {json.dumps(value, ensure_ascii=False)}")

    def comment(self, text: str) -> None:
        self.comments.append(f"  # {clean(text)}")

    def __str__(self) -> str:
        return "\n".join([*self.settings, *self.comments])


def to_spec(config: LaunchConfig, *, source: str, name: str = "train", script: str | None = None) -> str:
    """The text of a job spec. Settings without a counterpart in a spec become comments.

    Args:
        source: the configuration file's name, for a comment.
        name: name of the runs.
        script: path of the training script; None: the spec has a placeholder.
    """
    runtime = _runtime(config)
    entrypoint = _COMMAND if script is None else f"  script: {json.dumps(script, ensure_ascii=False)}\n  args: {{}}"
    text = (
        f"# Made by `hpcaccel config to-spec` from {clean(source)}.\n"
        "# Check it with `hpcaccel validate`, start it with `hpcaccel submit`.\n"
        f"name: {json.dumps(name, ensure_ascii=False)}\n\n"
        f"entrypoint:\n{entrypoint}\n\nslurm:\n{_slurm(config)}\n\n"
    )
    if runtime.settings or runtime.comments:
        text += f"runtime:\n{runtime}\n" if runtime.settings else f"runtime: {{}}\n{runtime}\n"
    return text


def _slurm(config: LaunchConfig) -> _Lines:
    lines = _Lines()
    nodes = config.num_machines or 1
    total = config.num_processes if config.num_processes and config.num_processes > 0 else None
    per_node = math.ceil((total or nodes) / nodes)
    lines.comment("partition: gpu                  # `sinfo` lists the partitions")
    lines.comment("account: my_project")
    lines.set("nodes", nodes)
    on_cpu = config.use_cpu or config.distributed_type == "MULTI_CPU"
    lines.set("ntasks_per_node" if on_cpu else "gpus_per_node", per_node)
    if total is None:
        lines.comment("num_processes is not set in the file: this is one rank per node")
    elif per_node * nodes != total:
        lines.comment(f"num_processes {total} cannot be split evenly over {nodes} nodes: these are {per_node * nodes}")
    lines.set("time", "1-00:00:00")
    left = [key for key in _FOUND_BY_THEMSELVES if _is_set(config, key)]
    if left:
        lines.comment(f"without a counterpart: {', '.join(left)} (in a job, ranks find each other by themselves)")
    for key, why in _NO_FIELD.items():
        if _is_set(config, key):
            lines.comment(f"without a counterpart: {key} ({why})")
    return lines


_USUAL = {"machine_rank": 0, "rdzv_backend": "static", "same_network": True, "gpu_ids": "all"}


def _is_set(config: LaunchConfig, key: str) -> bool:
    """Whether a key has a value that changes something."""
    value = getattr(config, key)
    return value not in (None, False, "", [], {}) and value != _USUAL.get(key)


def _runtime(config: LaunchConfig) -> _Lines:
    lines = _Lines()
    sharded = config.fsdp_config if config.distributed_type == "FSDP" else None
    deepspeed = config.deepspeed_config if config.distributed_type == "DEEPSPEED" else None
    strategy, section = "ddp", dict[str, Any]()
    if sharded is not None:
        strategy, section = _fsdp(typed(sharded), lines)
    elif deepspeed is not None:
        strategy, section = "deepspeed", _deepspeed(typed(deepspeed), lines)
    lines.settings.insert(0, f"  strategy: {strategy}")
    if config.mixed_precision:
        lines.set("mixed_precision", config.mixed_precision)
    if config.debug:
        lines.set("debug", True)
    _compile(typed(config.dynamo_config), lines)
    _dimensions(typed(config.parallelism_config), section if strategy == "fsdp" else None, lines)
    if section:
        lines.settings.append(f"  {strategy}:")
        for key, value in section.items():
            lines.set(key, value, indent=4)
    return lines


def _fsdp(values: dict[str, Any], lines: _Lines) -> tuple[str, dict[str, Any]]:
    """The strategy, and the section ``runtime.fsdp``."""
    section: dict[str, Any] = {}
    strategy = str(values.get("fsdp_sharding_strategy", ""))
    reshard = values.get("fsdp_reshard_after_forward")
    if str(reshard).lower() in ("true", "false"):
        reshard = str(reshard).lower() == "true"
    strategy = reshard if isinstance(reshard, str) and not strategy else strategy
    strategy = _SHARDING.get(strategy, strategy)
    if reshard is False or strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2"):
        section["reshard_after_forward"] = False
    if "HYBRID" in strategy:
        lines.comment(f"fsdp_sharding_strategy {strategy}: set fsdp.shard_size to the number of GPUs of a node")
    if values.get("fsdp_offload_params"):
        section["cpu_offload"] = True
    if wrap := values.get("fsdp_transformer_layer_cls_to_wrap"):
        section["wrap"] = [one.strip() for one in str(wrap).split(",") if one.strip()]
    if values.get("fsdp_activation_checkpointing"):
        lines.set("activation_checkpointing", True)
    if values.get("fsdp_auto_wrap_policy") == "SIZE_BASED_WRAP":
        lines.comment("fsdp_auto_wrap_policy SIZE_BASED_WRAP: name the classes in fsdp.wrap instead")
    if values.get("fsdp_state_dict_type") not in (None, "SHARDED_STATE_DICT"):
        lines.comment("fsdp_state_dict_type: checkpoints are sharded; `hpcaccel checkpoint convert` makes whole ones")
    left = [key for key, value in values.items() if key not in _FSDP_FIELDS and value not in (None, False, "")]
    if left:
        lines.comment(f"without a counterpart: {', '.join(sorted(left))}")
    if strategy == "NO_SHARD":
        lines.comment("fsdp_sharding_strategy NO_SHARD: this is strategy ddp, which has no settings of FSDP")
        return "ddp", {}
    return "fsdp", section


def _deepspeed(values: dict[str, Any], lines: _Lines) -> dict[str, Any]:
    """The section ``runtime.deepspeed``."""
    section: dict[str, Any] = {}
    file = values.get("deepspeed_config_file")
    if not file:
        section["zero_stage"] = values.get("zero_stage", 2)
    elif clean(str(file)) == str(file):
        section["config_file"] = str(file)
    else:
        lines.comment(f"deepspeed_config_file {file}: a path must be on one line")
    if steps := values.get("gradient_accumulation_steps"):
        if isinstance(steps, int):
            lines.set("gradient_accumulation_steps", steps)
        else:
            lines.comment(f"gradient_accumulation_steps {steps}: set it in the script")
    if (clip := values.get("gradient_clipping")) and isinstance(clip, float):
        section["gradient_clipping"] = clip
    for part, key in (("optimizer", "offload_optimizer"), ("param", "offload_params")):
        if (device := values.get(f"offload_{part}_device")) not in _ZERO_OFF:
            section[key] = device
    left = [key for key, value in values.items() if key not in _DEEPSPEED_FIELDS and value not in (None, False, "")]
    if left:
        lines.comment(f"without a counterpart: {', '.join(sorted(left))} (set them in deepspeed.config_file)")
    return section


def _compile(values: dict[str, Any], lines: _Lines) -> None:
    backend = str(values.get("dynamo_backend", "NO")).upper()
    if backend == "NO":
        return
    lines.set("compile", True)
    if backend != "INDUCTOR":
        lines.comment(f"dynamo_backend {backend}: set it in the script, Accelerator(dynamo_plugin=...)")
    left = [key for key, value in values.items() if key not in _DYNAMO_FIELDS and value not in (None, False, "default")]
    if left:
        lines.comment(f"without a counterpart: {', '.join(left)} (Accelerator(dynamo_plugin=...) in the script)")


def _dimensions(values: dict[str, Any], fsdp: dict[str, Any] | None, lines: _Lines) -> None:
    sizes = {key.removeprefix("parallelism_config_"): value for key, value in values.items()}
    if sizes.get("tp_size", 1) > 1:
        lines.set("tensor_parallel_size", sizes["tp_size"])
    if sizes.get("dp_replicate_size", 1) > 1 and fsdp is not None:
        fsdp["shard_size"] = sizes.get("dp_shard_size", 1)
    if sizes.get("cp_size", 1) > 1:
        lines.set("context_parallel_size", sizes["cp_size"])
    for key, default in (("cp_comm_strategy", "allgather"), ("sp_size", 1)):
        if sizes.get(key, default) != default:
            lines.comment(f"parallelism_config_{key}: set it in the script, Accelerator(parallelism_config=...)")
