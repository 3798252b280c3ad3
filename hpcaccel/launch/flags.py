"""The flags of ``hpcaccel launch``: those of Accelerate's launcher and of torchrun, with their help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["BY_NAME", "GROUPS", "PARALLELISM_CHOICES", "Flag", "spelled"]


@dataclass(frozen=True)
class Flag:
    """One flag. Its name has underscores; on the command line, dashes and underscores are the same."""

    name: str
    help: str
    kind: Literal["text", "whole", "number", "switch", "boolean", "list"] = "text"
    """``switch`` has no value, ``boolean`` has true or false, ``list`` may be given several times."""
    choices: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    """Other names of the flag, and its short form."""


def spelled(name: str) -> str:
    """The name as it is written on a command line."""
    return name if name.startswith("-") else "--" + name.replace("_", "-")


_WHAT = (
    Flag("help", "Show this page.", "switch", also=("-h",)),
    Flag("config_file", "Configuration file. Default: default_config.yaml in Accelerate's folder."),
    Flag("module", "The script is a Python module, as with `python -m`.", "switch", also=("-m",)),
    Flag("no_python", "The script is a program: start it without Python.", "switch"),
    Flag("quiet", "Leave out the launcher's own report about failed ranks.", "switch", also=("-q",)),
    Flag("debug", "Check the shapes of collectives (ACCELERATE_DEBUG_MODE).", "switch"),
    Flag("run_path", "Run the script inside torchrun's own interpreter (runpy.run_path).", "switch"),
)
_SIZE = (
    Flag("num_processes", "Number of ranks on all machines together.", "whole"),
    Flag("nproc_per_node", "Number of ranks on each machine, or gpu, cpu, xpu, auto."),
    Flag("num_machines", "Number of machines.", "whole"),
    Flag("nnodes", "Number of machines, or MIN:MAX for an elastic group."),
    Flag("multi_gpu", "Train on several GPUs.", "switch"),
    Flag("cpu", "Train on CPUs (ACCELERATE_USE_CPU).", "switch"),
    Flag("tpu", "Train on TPUs.", "switch"),
    Flag("gpu_ids", "GPUs of this machine to use: 'all', or comma-separated indices."),
    Flag("num_cpu_threads_per_process", "OMP_NUM_THREADS of each rank.", "whole"),
    Flag("enable_cpu_affinity", "Bind each rank to the CPUs near its GPU (NVIDIA, AMD).", "switch"),
)
_MACHINES = (
    Flag("machine_rank", "Number of this machine, from 0.", "whole", also=("node_rank",)),
    Flag("main_process_ip", "Address of machine 0.", also=("master_addr",)),
    Flag("main_process_port", "Port on machine 0. Default: a free one on one machine.", "whole", also=("master_port",)),
    Flag("same_network", "Rendezvous at the address of machine 0.", "switch"),
    Flag("standalone", "Use one machine, even inside an allocation.", "switch"),
    Flag("rdzv_backend", "Rendezvous: static or c10d."),
    Flag("rdzv_endpoint", "Address and port of the rendezvous, HOST:PORT."),
    Flag("rdzv_id", "Name of the group of ranks."),
    Flag("rdzv_conf", "Further rendezvous settings: comma-separated KEY=VALUE."),
    Flag("max_restarts", "How often failed ranks are started again.", "whole"),
    Flag("monitor_interval", "Seconds between two checks of the ranks.", "number"),
    Flag("local_addr", "Address of this machine."),
    Flag("role", "Name of the ranks' role."),
    Flag("mpirun_hostfile", "Start the ranks by mpirun, on the hosts of this file."),
)
_OUTPUT = (
    Flag("log_dir", "Folder for the ranks' output."),
    Flag("redirects", "Streams that go into files: 0 none, 1 stdout, 2 stderr, 3 both; or comma-separated RANK:N.",
         also=("-r",)),
    Flag("tee", "Streams that go into files and to the terminal, as above.", also=("-t",)),
    Flag("local_ranks_filter", "Show the output of these ranks only, such as 0,1."),
    Flag("duplicate_stdout_filters", "Copy lines of stdout with these words into one file."),
    Flag("duplicate_stderr_filters", "Copy lines of stderr with these words into one file."),
    Flag("logs_specs", "Entry point that decides where the output goes."),
    Flag("start_method", "How Python functions are started.", choices=("spawn", "fork", "forkserver")),
    Flag("event_log_handler", "Handler of torchrun's events."),
    Flag("numa_binding", "Bind ranks to CPUs.", choices=("node", "socket", "exclusive", "core-complex")),
    Flag("signals_to_handle", "Signals that torchrun passes on."),
    Flag("shutdown_timeout", "Seconds that ranks have to end after a signal. Default: 300.", "whole"),
    Flag("virtual_local_rank", "Each rank sees its own GPU only, as number 0.", "switch"),
)  # fmt: skip
_TRAINING = (
    Flag("mixed_precision", "Precision.", choices=("no", "fp16", "bf16", "fp8")),
    Flag("gradient_accumulation_steps", "Micro-batches in one step of the optimizer."),
    Flag("gradient_clipping", "Largest norm of the gradients (DeepSpeed)."),
    Flag("dynamo_backend", "Compile the model with this backend; no: do not."),
    Flag("dynamo_mode", "Mode of torch.compile.",
         choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")),
    Flag("dynamo_use_fullgraph", "Do not allow graph breaks.", "switch"),
    Flag("dynamo_use_dynamic", "Compile for dynamic shapes.", "switch"),
    Flag("dynamo_use_regional_compilation", "Compile repeated blocks one by one.", "switch"),
    Flag("use_fsdp", "Shard the model (FSDP).", "switch"),
    Flag("use_deepspeed", "Train with DeepSpeed.", "switch"),
    Flag("use_parallelism_config", "Use the sizes of --parallelism-config-*.", "switch"),
)  # fmt: skip
_FSDP = (
    Flag("fsdp_version", "1 or 2; hpcaccel always uses 2.", choices=("1", "2")),
    Flag("fsdp_sharding_strategy", "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, or its number."),
    Flag("fsdp_reshard_after_forward", "true or false, or a sharding strategy."),
    Flag("fsdp_offload_params", "Keep parameters in host memory.", "boolean"),
    Flag("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP."),
    Flag("fsdp_transformer_layer_cls_to_wrap", "Comma-separated class names of the blocks."),
    Flag("fsdp_min_num_params", "Size of a block for SIZE_BASED_WRAP.", "whole"),
    Flag("fsdp_backward_prefetch", "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH."),
    Flag("fsdp_forward_prefetch", "Prefetch in the forward pass.", "boolean"),
    Flag("fsdp_state_dict_type", "FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT."),
    Flag("fsdp_use_orig_params", "FSDP1 only.", "boolean"),
    Flag("fsdp_cpu_ram_efficient_loading", "Only rank 0 reads a pretrained model.", "boolean"),
    Flag("fsdp_sync_module_states", "Broadcast rank 0's parameters.", "boolean"),
    Flag("fsdp_activation_checkpointing", "Recompute activations in the backward pass.", "boolean"),
    Flag("fsdp_activation_checkpointing_offload", "Keep the inputs of the blocks in host memory.", "boolean"),
    Flag("fsdp_ignored_modules", "Modules that are not sharded."),
)
_DEEPSPEED = (
    Flag("deepspeed_config_file", "DeepSpeed's JSON file."),
    Flag("zero_stage", "ZeRO stage.", choices=("0", "1", "2", "3")),
    Flag("offload_optimizer_device", "Where the optimizer state is.", choices=("none", "cpu", "nvme")),
    Flag("offload_param_device", "Where the parameters are.", choices=("none", "cpu", "nvme")),
    Flag("offload_optimizer_nvme_path", "Folder for the optimizer state."),
    Flag("offload_param_nvme_path", "Folder for the parameters."),
    Flag("zero3_init_flag", "Create models sharded (ZeRO 3).", "boolean"),
    Flag("zero3_save_16bit_model", "Save 16-bit weights (ZeRO 3).", "boolean"),
    Flag("deepspeed_moe_layer_cls_names", "Comma-separated class names of mixture-of-experts blocks."),
    Flag("deepspeed_multinode_launcher", "Only `standard`: one launcher on each machine."),
    Flag("deepspeed_hostfile", "Not supported: DeepSpeed's own launcher."),
    Flag("deepspeed_exclusion_filter", "Not supported: DeepSpeed's own launcher."),
    Flag("deepspeed_inclusion_filter", "Not supported: DeepSpeed's own launcher."),
)
PARALLELISM_CHOICES: Mapping[str, tuple[str, ...]] = {
    "cp_backend": ("torch",),
    "cp_comm_strategy": ("allgather", "alltoall"),
    "sp_backend": ("deepspeed",),
}
"""Values of --parallelism-config-*, without the prefix."""
_PARALLELISM = tuple(
    Flag(f"parallelism_config_{name}", help, kind, PARALLELISM_CHOICES.get(name, ()))  # type: ignore[arg-type]
    for name, help, kind in (
        ("dp_replicate_size", "Number of replicas.", "whole"),
        ("dp_shard_size", "Ranks over which a replica is sharded.", "whole"),
        ("tp_size", "Ranks of tensor parallelism.", "whole"),
        ("cp_size", "Ranks of context parallelism.", "whole"),
        ("cp_backend", "Library.", "text"),
        ("cp_comm_strategy", "Exchange of keys and values.", "text"),
        ("sp_size", "Ranks of sequence parallelism.", "whole"),
        ("sp_backend", "Library.", "text"),
        ("sp_seq_length", "Length of the sequences.", "text"),
        ("sp_seq_length_is_variable", "Whether the length differs between batches.", "boolean"),
        ("sp_attn_implementation", "Implementation of attention.", "text"),
    )
)
_FP8 = (
    Flag("fp8_backend", "Library.", choices=("ao", "te", "msamp")),
    Flag("fp8_format", "HYBRID, E4M3 or E5M2.", choices=("HYBRID", "E4M3", "E5M2")),
    Flag("fp8_margin", "Margin of the scaling factor.", "whole"),
    Flag("fp8_interval", "Steps between two scaling factors.", "whole"),
    Flag("fp8_amax_history_len", "Length of the history of maxima.", "whole"),
    Flag("fp8_amax_compute_algo", "How the maximum is chosen.", choices=("max", "most_recent")),
    Flag("fp8_override_linear_precision", "Higher precision for fprop, dgrad, wgrad: three comma-separated booleans."),
    Flag("fp8_use_autocast_during_eval", "fp8 in evaluation, too.", "switch"),
    Flag("fp8_opt_level", "MS-AMP's level.", choices=("O1", "O2")),
    Flag("fp8_enable_fsdp_float8_all_gather", "Gather parameters in fp8 (torchao).", "boolean"),
    Flag("fp8_pad_inner_dim", "Pad matrices (torchao).", "boolean"),
)
_TPU = (
    Flag("main_training_function", "Function of the script that each TPU core runs."),
    Flag("downcast_bf16", "Cast double tensors to bf16, too.", "switch"),
    Flag("tpu_cluster", "Not supported: TPU pods.", "switch", also=("tpu_use_cluster",)),
    Flag("no_tpu_cluster", "No TPU pod.", "switch"),
    Flag("tpu_use_sudo", "Not supported: TPU pods.", "switch"),
    Flag("vm", "Not supported: TPU pods.", "list"),
    Flag("env", "Not supported: TPU pods.", "list"),
)

GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "Program": _WHAT,
    "Ranks": _SIZE,
    "Several machines": _MACHINES,
    "Output and signals": _OUTPUT,
    "Training": _TRAINING,
    "FSDP (with --use-fsdp)": _FSDP,
    "DeepSpeed (with --use-deepspeed)": _DEEPSPEED,
    "Parallelism": _PARALLELISM,
    "fp8 (with --mixed-precision fp8)": _FP8,
    "TPU": _TPU,
}

BY_NAME: Mapping[str, Flag] = {
    name: flag for flags in GROUPS.values() for flag in flags for name in (flag.name, *flag.also)
}
"""All flags, by each of their names; short forms have their dash."""
