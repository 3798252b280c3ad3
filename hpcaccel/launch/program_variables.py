"""The environment variables that configure the launched program: those of Accelerate's launcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcaccel.errors import UserError
from hpcaccel.launch.mesh_sizes import check_sizes

__all__ = ["program_variables", "variables_switched_off"]

_FSDP_NAMES = {
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "fsdp_backward_prefetch_policy": "FSDP_BACKWARD_PREFETCH",
}
"""Variables that are not named like their option."""
_FP8_NAMES = {
    "fp8_amax_history_length": "fp8_amax_history_len",
    "fp8_amax_compute_algorithm": "fp8_amax_compute_algo",
    "fp8_optimization_level": "fp8_opt_level",
}
"""Older names of options in a file."""
_DEEPSPEED = {
    "zero_stage": "DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "DEEPSPEED_MOE_LAYER_CLS_NAMES",
    "gradient_clipping": "GRADIENT_CLIPPING",
}
_OVERRIDE = ("FPROP", "DGRAD", "WGRAD")
_SWITCHES = {
    "cpu": ("ACCELERATE_USE_CPU", "HPCACCEL_USE_CPU"),
    "debug": ("ACCELERATE_DEBUG_MODE",),
    "enable_cpu_affinity": ("ACCELERATE_CPU_AFFINITY",),
    "use_fsdp": ("ACCELERATE_USE_FSDP",),
    "use_deepspeed": ("ACCELERATE_USE_DEEPSPEED",),
    "use_parallelism_config": ("ACCELERATE_USE_PARALLELISM_CONFIG",),
}
"""Variables that switch something on, by their option."""


def program_variables(options: Mapping[str, Any], *, from_file: frozenset[str] = frozenset()) -> dict[str, str]:
    """The variables for these options. A variable whose option is not given is left as it is in the environment.

    Args:
        options: by the name of their flag.
        from_file: names of the options that the configuration file gives. DeepSpeed's plugin reads them to name options
            that its JSON file contradicts.

    Raises:
        UserError: a value that is not valid.
    """
    found = {
        "ACCELERATE_MIXED_PRECISION": options.get("mixed_precision"),
        "ACCELERATE_USE_CPU": options.get("cpu") or None,
        "ACCELERATE_DEBUG_MODE": options.get("debug") or None,
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": _accumulation(options),
        "ACCELERATE_CPU_AFFINITY": "1" if options.get("enable_cpu_affinity") else None,
        "OMP_NUM_THREADS": options.get("num_cpu_threads_per_process"),
        **_dynamo(options),
        **_parallelism(options, from_file),
    }
    if options.get("use_fsdp"):
        found |= {"ACCELERATE_USE_FSDP": True, **_fsdp(options)}
    if options.get("use_deepspeed"):
        found |= {f"ACCELERATE_{name}": options.get(option) for option, name in _DEEPSPEED.items()}
        fields = sorted(from_file & {*_DEEPSPEED, "gradient_accumulation_steps", "mixed_precision"})
        found |= {"ACCELERATE_USE_DEEPSPEED": True, "ACCELERATE_CONFIG_DS_FIELDS": ",".join(fields)}
    if options.get("mixed_precision") == "fp8":
        found |= _fp8(options)
    if options.get("tpu"):
        found["PJRT_DEVICE"] = "TPU"
        if options.get("mixed_precision") == "bf16":
            found["XLA_DOWNCAST_BF16" if options.get("downcast_bf16") else "XLA_USE_BF16"] = "1"
    return {name: _text(value) for name, value in found.items() if value is not None}


def variables_switched_off(options: Mapping[str, Any]) -> set[str]:
    """The variables to remove from the environment: those of switches that the command line or the file turns off."""
    return {name for option, names in _SWITCHES.items() if options.get(option) is False for name in names}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _accumulation(options: Mapping[str, Any]) -> Any:
    steps = options.get("gradient_accumulation_steps")
    if steps is None or (options.get("use_deepspeed") and steps == "auto"):
        return steps
    if not str(steps).isdecimal() or int(steps) < 1:
        raise UserError(f"--gradient-accumulation-steps {steps!r} must be a whole number of at least 1")
    return steps


def _dynamo(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if name.startswith("dynamo_")}
    if "dynamo_backend" in given:
        given["dynamo_backend"] = str(given["dynamo_backend"]).upper()
    return {f"ACCELERATE_{name.upper()}": value for name, value in given.items()}


def _fsdp(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if name.startswith("fsdp_")}
    if given.get("fsdp_cpu_ram_efficient_loading") is True and given.get("fsdp_sync_module_states") is False:
        raise UserError(
            "--fsdp-cpu-ram-efficient-loading true needs --fsdp-sync-module-states true: only rank 0 reads the weights"
        )
    return {_FSDP_NAMES.get(name, name.upper()): value for name, value in given.items()}


def _parallelism(options: Mapping[str, Any], from_file: frozenset[str]) -> dict[str, Any]:
    check_sizes(options, from_file=from_file)
    given = {name: value for name, value in options.items() if name.startswith("parallelism_config_")}
    used = options.get("use_parallelism_config", any(name.endswith("_size") for name in given))
    return {"ACCELERATE_USE_PARALLELISM_CONFIG": used or None, **{name.upper(): given[name] for name in given}}


def _fp8(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {_FP8_NAMES.get(name, name): value for name, value in options.items() if name.startswith("fp8_")}
    found = {f"ACCELERATE_{name.upper()}": value for name, value in given.items()}
    override = found.pop("ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION", None)
    if override is None:
        return found
    words = override.split(",") if isinstance(override, str) else list(override)
    if len(words) != len(_OVERRIDE):
        raise UserError(f"--fp8-override-linear-precision {override!r} must be three booleans separated by commas")
    return found | {f"ACCELERATE_FP8_OVERRIDE_{name}": word for name, word in zip(_OVERRIDE, words, strict=True)}
