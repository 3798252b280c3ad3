"""The questions of ``hpcaccel config``, and the configuration built from the answers.

The configuration has the keys that ``accelerate config`` writes, so that both programs can launch with the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from hpcaccel.core.default_config import PRECISIONS
from hpcaccel.launch.launch_config import LaunchConfig

__all__ = ["Asker", "ask_everything"]


class Asker(Protocol):
    """Interface that asks the user questions. ``hpcaccel.launch.terminal_asker`` implements it for a terminal."""

    def choose(self, question: str, choices: Sequence[tuple[str, str]], default: str) -> str:
        """Ask for one of the choices, each a pair (value, text). Returns the value."""

    def agree(self, question: str, *, default: bool) -> bool:
        """Ask a yes-or-no question."""

    def number(self, question: str, default: float, *, least: int = 1, whole: bool = True) -> float:
        """Ask for a number of at least ``least``; an integer if ``whole``."""

    def text(self, question: str, default: str = "", *, required: bool = True) -> str:
        """Ask for a line of text; not empty if ``required``."""


_HARDWARE = (
    ("NO", "One process: a single GPU, an Apple GPU or the CPU"),
    ("MULTI_GPU", "Several GPUs (NVIDIA or AMD)"),
    ("MULTI_CPU", "Several processes on CPUs"),
    ("MULTI_XPU", "Several Intel GPUs (XPU)"),
    ("MULTI_HPU", "Several Intel Gaudi (HPU)"),
    ("MULTI_NPU", "Several Ascend NPUs"),
    ("MULTI_MLU", "Several Cambricon MLUs"),
    ("MULTI_SDAA", "Several SDAA devices"),
    ("MULTI_MUSA", "Several Moore Threads GPUs (MUSA)"),
    ("MULTI_NEURON", "Several AWS Neuron cores"),
    ("XLA", "A TPU"),
)
_BACKENDS = ("inductor", "eager", "aot_eager", "cudagraphs", "onnxrt", "tensorrt", "tvm")
_MODES = ("default", "reduce-overhead", "max-autotune")
_WRAPS = (
    ("TRANSFORMER_BASED_WRAP", "By class: each transformer layer"),
    ("SIZE_BASED_WRAP", "By size: each module with enough parameters"),
    ("NO_WRAP", "The whole model as one part"),
)
_STATES = (
    ("SHARDED_STATE_DICT", "Sharded: every rank saves its own part"),
    ("FULL_STATE_DICT", "Full: rank 0 saves the whole model"),
)
_OFFLOADS = (("none", "Nowhere: keep them on the GPU"), ("cpu", "To CPU memory"), ("nvme", "To an NVMe disk"))
_NO_SHARDING = {"MULTI_CPU", "MULTI_NEURON", "XLA"}


def ask_everything(ask: Asker) -> LaunchConfig:
    """Ask all questions, and return the configuration built from the answers.

    Raises:
        KeyboardInterrupt: the user has pressed Ctrl-C.
    """
    kind = ask.choose("Where will the training run?", _HARDWARE, "MULTI_GPU")
    values: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "use_cpu": False}
    values |= _machines(ask, several=kind not in ("NO", "XLA"))
    if kind == "NO":
        values["use_cpu"] = ask.agree("Train on the CPU, even if there is a GPU?", default=False)
    elif kind == "MULTI_CPU":
        values |= {"use_cpu": True} | _mpirun(ask)
    values["dynamo_config"] = _dynamo(ask)
    values |= _sharding(ask, kind, values)
    values["num_processes"] = _processes(ask, kind, values["num_machines"])
    values |= _devices(ask, kind, on_cpu=values["use_cpu"])
    values |= _tpu(ask) if kind == "XLA" else _precision(ask, values.get("deepspeed_config") or {})
    return LaunchConfig(**values)


def _machines(ask: Asker, *, several: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_machines": 1, "machine_rank": 0, "rdzv_backend": "static", "same_network": True, "debug": False
    }  # fmt: skip
    if not several:
        return found
    count = found["num_machines"] = int(ask.number("How many machines (nodes)?", 1))
    if count > 1:
        ranks = [(str(number), str(number)) for number in range(count)]
        found["machine_rank"] = int(ask.choose("Which of them is this one?", ranks, "0"))
        found["main_process_ip"] = ask.text("Address of machine 0, which the others connect to:")
        found["main_process_port"] = int(ask.number("Its port:", 29500))
        found["same_network"] = ask.agree("Are all machines on the same local network?", default=True)
        if not found["same_network"]:
            backends = [("static", "static: the address above"), ("c10d", "c10d: nodes may join later")]
            found["rdzv_backend"] = ask.choose("How do the machines find each other?", backends, "static")
    found["debug"] = ask.agree("Compare shapes between ranks before each collective? (slower)", default=False)
    return found


def _mpirun(ask: Asker) -> dict[str, Any]:
    if not ask.agree("Start the processes with mpirun?", default=False):
        return {}
    path = ask.text("Path of mpirun's hostfile:", "~/hostfile")
    return {"mpirun_config": {"mpirun_hostfile": os.path.expanduser(path)}}


def _dynamo(ask: Asker) -> dict[str, Any]:
    if not ask.agree("Compile the model with torch.compile?", default=False):
        return {}
    chosen = ask.choose("With which backend?", [(one.upper(), one) for one in _BACKENDS], "INDUCTOR")
    found: dict[str, Any] = {"dynamo_backend": chosen}
    if ask.agree("Change further options of torch.compile?", default=False):
        found["dynamo_mode"] = ask.choose("Mode:", [(one, one) for one in _MODES], "default")
        found["dynamo_use_fullgraph"] = ask.agree("Require one graph (fullgraph)?", default=False)
        found["dynamo_use_dynamic"] = ask.agree("Trace with dynamic shapes?", default=False)
        found["dynamo_use_regional_compilation"] = ask.agree("Compile repeated blocks only once?", default=False)
    return found


def _sharding(ask: Asker, kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """Answers about sharding. They replace ``distributed_type`` if the model is sharded."""
    if kind in _NO_SHARDING or values["use_cpu"]:
        return {}
    choices = [("no", "No: every GPU has the whole model (DDP)" if kind != "NO" else "No")]
    if kind != "NO":
        choices.append(("fsdp", "FSDP: parameters, gradients and optimizer are split over the GPUs"))
    choices.append(("deepspeed", "DeepSpeed"))
    chosen = ask.choose("Shard the model?", choices, "no")
    if chosen == "fsdp":
        return {"distributed_type": "FSDP", "fsdp_config": _fsdp(ask), "parallelism_config": _parallelism(ask)}
    if chosen == "deepspeed":
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": _deepspeed(ask, values["num_machines"])}
    return {}


def _fsdp(ask: Asker) -> dict[str, Any]:
    found: dict[str, Any] = {"fsdp_version": 2}
    found["fsdp_reshard_after_forward"] = ask.agree("Free gathered parameters after the forward pass?", default=True)
    found["fsdp_offload_params"] = ask.agree("Keep parameters and gradients in CPU memory?", default=False)
    wrap = found["fsdp_auto_wrap_policy"] = ask.choose("Which modules are sharded?", _WRAPS, _WRAPS[0][0])
    if wrap == "TRANSFORMER_BASED_WRAP":
        names = ask.text("Comma-separated class names of the layers (empty: the model's own list):", required=False)
        if names:
            found["fsdp_transformer_layer_cls_to_wrap"] = names
    elif wrap == "SIZE_BASED_WRAP":
        found["fsdp_min_num_params"] = int(ask.number("Least number of parameters of a module:", 100_000_000))
    found["fsdp_state_dict_type"] = ask.choose("How are models saved?", _STATES, _STATES[0][0])
    found["fsdp_cpu_ram_efficient_loading"] = ask.agree("Load pretrained weights on rank 0 only?", default=True)
    found["fsdp_activation_checkpointing"] = ask.agree("Recompute activations? (less memory, slower)", default=False)
    return found


def _parallelism(ask: Asker) -> dict[str, Any]:
    if not ask.agree("Combine it with tensor or context parallelism, or with replicas?", default=False):
        return {}
    names = {"dp_replicate": "replicas", "dp_shard": "shards", "tp": "tensor parallel", "cp": "context parallel"}
    found: dict[str, Any] = {
        f"parallelism_config_{name}_size": int(ask.number(f"Size of the dimension '{text}':", 1))
        for name, text in names.items()
    }
    if found["parallelism_config_cp_size"] > 1:
        ways = [("allgather", "allgather"), ("alltoall", "alltoall")]
        found["parallelism_config_cp_comm_strategy"] = ask.choose("Context parallel exchange:", ways, "allgather")
    return found


def _deepspeed(ask: Asker, machines: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if ask.agree("Is there a JSON file with DeepSpeed's settings?", default=False):
        found["deepspeed_config_file"] = ask.text("Path of the file:")
    else:
        stages = [
            ("0", "0: nothing is sharded"), ("1", "1: the optimizer's state"), ("2", "2: and the gradients"),
            ("3", "3: and the parameters"),
        ]  # fmt: skip
        stage = found["zero_stage"] = int(ask.choose("Which ZeRO stage?", stages, "2"))
        if stage >= 2:
            found |= _offload(ask, "optimizer", "the optimizer's state")
            found |= _offload(ask, "param", "the parameters")
        found["gradient_accumulation_steps"] = int(ask.number("Gradient accumulation steps:", 1))
        if ask.agree("Clip gradients?", default=False):
            found["gradient_clipping"] = ask.number("Largest norm:", 1.0, least=0, whole=False)
        if stage == 3:
            found["zero3_save_16bit_model"] = ask.agree("Save 16-bit weights?", default=False)
    found["zero3_init_flag"] = ask.agree("Build transformers models sharded (zero.Init)?", default=False)
    if ask.agree("Is it a mixture of experts?", default=False):
        found["deepspeed_moe_layer_cls_names"] = ask.text("Comma-separated class names of its MoE layers:")
    if machines > 1:
        names = ("standard", "pdsh", "openmpi", "mvapich", "mpich", "nossh", "slurm")
        launcher = ask.choose("Which launcher of DeepSpeed?", [(one, one) for one in names], "standard")
        found["deepspeed_multinode_launcher"] = launcher
        if launcher != "standard":
            found["deepspeed_hostfile"] = ask.text("Path of its hostfile:")
    return found


def _offload(ask: Asker, part: str, text: str) -> dict[str, Any]:
    device = ask.choose(f"Where to offload {text}?", _OFFLOADS, "none")
    found = {f"offload_{part}_device": device}
    if device == "nvme":
        found[f"offload_{part}_nvme_path"] = ask.text("Directory on the NVMe disk:", "/nvme")
    return found


def _processes(ask: Asker, kind: str, machines: int) -> int:
    if kind == "NO":
        return 1
    what = {"MULTI_CPU": "processes", "XLA": "TPU cores", "MULTI_GPU": "GPUs"}.get(kind, "devices")
    return int(ask.number(f"How many {what}, on all machines together?", max(2, machines), least=machines))


def _devices(ask: Asker, kind: str, *, on_cpu: bool) -> dict[str, Any]:
    if on_cpu or kind in ("MULTI_CPU", "XLA"):
        return {"enable_cpu_affinity": False}
    found: dict[str, Any] = {"gpu_ids": ask.text("Which devices of this machine, as 0,1 or all?", "all")}
    asks = kind in ("NO", "MULTI_GPU")
    found["enable_cpu_affinity"] = asks and ask.agree("Bind ranks to the CPUs near their GPU (NVIDIA)?", default=False)
    return found


def _precision(ask: Asker, deepspeed: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"main_training_function": "main", "downcast_bf16": False}
    found |= {"tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False}
    if "deepspeed_config_file" in deepspeed:
        return found  # the file has the precision
    found["mixed_precision"] = ask.choose("Precision?", [(one, _WORDS[one]) for one in PRECISIONS], "bf16")
    if found["mixed_precision"] == "fp8":
        backends = [("AO", "torchao"), ("TE", "Transformer Engine"), ("MSAMP", "MS-AMP")]
        found["fp8_config"] = {"backend": ask.choose("Which FP8 library?", backends, "AO")}
    return found


_WORDS = {"no": "no: fp32", "bf16": "bf16", "fp16": "fp16, with loss scaling", "fp8": "fp8, on Hopper or newer"}


def _tpu(ask: Asker) -> dict[str, Any]:
    found: dict[str, Any] = {"mixed_precision": "no", "downcast_bf16": False, "tpu_env": [], "tpu_use_sudo": False}
    found["main_training_function"] = ask.text("Function in the script that every process calls:", "main")
    found["tpu_use_cluster"] = ask.agree("Is it a TPU pod?", default=False)
    if found["tpu_use_cluster"]:
        found["tpu_name"] = ask.text("Name of the pod:")
        found["tpu_zone"] = ask.text("Its zone:")
        found["tpu_use_sudo"] = ask.agree("Run with sudo there?", default=False)
    return found
