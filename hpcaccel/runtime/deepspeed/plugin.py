"""``DeepSpeedPlugin``: the settings of DeepSpeed's engine, from arguments, environment variables and a JSON file."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.deepspeed.json_config import AUTO, ConfigValues, HfDeepSpeedConfig
from hpcaccel.runtime.launch_env import parse_flag_from_env

__all__ = ["DeepSpeedPlugin"]

PREFIX = "ACCELERATE_DEEPSPEED_"
_OFFLOAD = ("none", "cpu", "nvme")
_IN_CONFIG = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""For each field, the name of the same value in the JSON configuration."""


def _whole(text: str) -> int:
    return int(text)


def _whole_or_auto(text: str) -> int | str:
    return AUTO if text == AUTO else int(text)


def _number_or_auto(text: str) -> float | str:
    return AUTO if text == AUTO else float(text)


def _of(name: str, parse: Callable[[str], Any], default: Any) -> Any:
    """The value of an environment variable; ``default`` if it is not set, empty or ``none``.

    Raises:
        RuntimeMisuse: the value cannot be parsed.
    """
    text = os.environ.get(name, "").strip()
    if not text or text.lower() == "none":
        return default
    try:
        return parse(text)
    except ValueError:
        raise RuntimeMisuse(f"{name}={text!r} is not a number") from None


@dataclass
class DeepSpeedPlugin(ConfigValues):
    """Settings of DeepSpeed, with Accelerate's field names.

    Fields that are None are read from ``ACCELERATE_DEEPSPEED_*`` variables. If there is a JSON configuration, its
    values are used, and the other fields only replace its ``auto`` values.

    Args:
        hf_ds_config: path of a JSON file, a dict or a ``HfDeepSpeedConfig``.
        gradient_accumulation_steps: number of micro-batches per step; by default, the Accelerator's.
        gradient_clipping: largest norm of the gradients; by default 1.0, or as in the JSON configuration.
        zero_stage: 0 to 3; default 2.
        is_train_batch_min: whether to take the smallest batch size of several loaders, instead of the largest.
        offload_optimizer_device, offload_param_device: ``none``, ``cpu`` or ``nvme``.
        offload_optimizer_nvme_path, offload_param_nvme_path: directories for ``nvme``.
        zero3_init_flag: whether models that transformers loads are sharded as they are created (ZeRO-3 only).
        zero3_save_16bit_model: the value ``stage3_gather_16bit_weights_on_model_save`` of the configuration.
        transformer_moe_cls_names: comma-separated classes of mixture-of-experts layers that ZeRO-3 gathers as a whole.
        enable_msamp, msamp_opt_level: MS-AMP is not supported.

    Raises:
        RuntimeMisuse: a value is not allowed, or the configuration cannot be read.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None
    _selected: bool = field(default=False, init=False, repr=False, compare=False)
    _for_transformers: Any = field(default=None, init=False, repr=False, compare=False)
    """Transformers' own configuration object, to which transformers keeps only a weak reference."""

    def __post_init__(self) -> None:
        if self.enable_msamp or (self.enable_msamp is None and os.environ.get("ACCELERATE_FP8_BACKEND") == "MSAMP"):
            raise RuntimeMisuse("DeepSpeed with MS-AMP is not supported: use mixed_precision=bf16")
        if self.hf_ds_config is None:
            self.hf_ds_config = _of(f"{PREFIX}CONFIG_FILE", str, None)
        given = {name for name in _IN_CONFIG if getattr(self, name) is not None}
        given.update(os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(","))  # those of a configuration file
        self._read_environment()
        if self.hf_ds_config is None:
            self.hf_ds_config = HfDeepSpeedConfig(self._as_config())
        else:
            self._read_config({name: getattr(self, name) for name in _IN_CONFIG if name in given})
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        self.deepspeed_config.setdefault("steps_per_print", float("inf"))  # it would print to stdout
        is_zero3 = self.hf_ds_config.is_zero3()
        if self.zero3_init_flag is None:
            self.zero3_init_flag = is_zero3 and parse_flag_from_env(f"{PREFIX}ZERO3_INIT", True)
        elif self.zero3_init_flag and not is_zero3:
            warnings.warn("zero3_init_flag applies only to ZeRO stage 3: it has no effect", stacklevel=3)
            self.zero3_init_flag = False

    def _read_environment(self) -> None:
        """Set fields that are None from the environment, else to their defaults.

        Raises:
            RuntimeMisuse: a value is not allowed.
        """
        found = {
            "gradient_accumulation_steps": _of("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", _whole_or_auto, AUTO),
            "gradient_clipping": _of("ACCELERATE_GRADIENT_CLIPPING", _number_or_auto, AUTO),
            "zero_stage": _of(f"{PREFIX}ZERO_STAGE", _whole, 2),
            "offload_optimizer_device": _of(f"{PREFIX}OFFLOAD_OPTIMIZER_DEVICE", str, "none"),
            "offload_param_device": _of(f"{PREFIX}OFFLOAD_PARAM_DEVICE", str, "none"),
            "offload_optimizer_nvme_path": _of(f"{PREFIX}OFFLOAD_OPTIMIZER_NVME_PATH", str, "none"),
            "offload_param_nvme_path": _of(f"{PREFIX}OFFLOAD_PARAM_NVME_PATH", str, "none"),
            "zero3_save_16bit_model": parse_flag_from_env(f"{PREFIX}ZERO3_SAVE_16BIT_MODEL"),
            "transformer_moe_cls_names": _of(f"{PREFIX}MOE_LAYER_CLS_NAMES", str, None),
        }
        for name, value in found.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.zero_stage not in (0, 1, 2, 3):
            raise RuntimeMisuse(f"DeepSpeedPlugin(zero_stage={self.zero_stage!r}) is not valid (allowed: 0, 1, 2, 3)")
        for name in ("offload_optimizer_device", "offload_param_device"):
            value = getattr(self, name)
            if value not in _OFFLOAD:
                raise RuntimeMisuse(f"DeepSpeedPlugin({name}={value!r}) is not valid (allowed: {', '.join(_OFFLOAD)})")

    def _as_config(self) -> dict[str, Any]:
        """The JSON configuration that follows from the fields."""

        def offload(device: str | None, path: str | None) -> dict[str, Any]:
            return {"device": device, **({"nvme_path": path} if device == "nvme" else {})}

        return {
            "train_batch_size": AUTO,
            "train_micro_batch_size_per_gpu": AUTO,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "gradient_clipping": self.gradient_clipping,
            "zero_optimization": {
                "stage": self.zero_stage,
                "offload_optimizer": offload(self.offload_optimizer_device, self.offload_optimizer_nvme_path),
                "offload_param": offload(self.offload_param_device, self.offload_param_nvme_path),
                "stage3_gather_16bit_weights_on_model_save": self.zero3_save_16bit_model,
            },
        }

    def _read_config(self, given: dict[str, Any]) -> None:
        """Replace ``auto`` values of the JSON configuration with the fields, and set the fields to its other values.

        Args:
            given: the fields that the script or its launcher's configuration file sets.
        """
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
        read, config = self.hf_ds_config, self.hf_ds_config.config
        config.setdefault("gradient_accumulation_steps", AUTO)
        config.setdefault("zero_optimization", {"stage": 0})
        if config.get("train_batch_size", AUTO) == AUTO:
            config.setdefault("train_micro_batch_size_per_gpu", AUTO)
        for name, key in _IN_CONFIG.items():
            node, last = read.find_config_node(key)
            if node is not None and node.get(last) == AUTO:
                node[last] = getattr(self, name)
            value = read.get_value(key)
            if value is not None and value != AUTO:
                if given.get(name, AUTO) not in (AUTO, value):
                    warnings.warn(
                        f"DeepSpeedPlugin({name}={given[name]!r}) has no effect, because the JSON configuration sets "
                        f"{key} to {value!r}. Remove one of them, or write auto in the configuration",
                        stacklevel=4,
                    )
                setattr(self, name, value)
        read.set_stage_and_offload()

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Let ZeRO-3 gather the layers in ``transformer_moe_cls_names`` as a whole.

        Raises:
            RuntimeMisuse: the model has no layer of such a class.
        """
        if self.transformer_moe_cls_names is None:
            return
        from deepspeed.utils import set_z3_leaf_modules

        wanted = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
        classes = {type(module).__name__: type(module) for module in model.modules()}
        if missing := [name for name in wanted if name not in classes]:
            raise RuntimeMisuse(f"transformer_moe_cls_names lists {', '.join(missing)}, which the model does not have")
        set_z3_leaf_modules(model, [classes[name] for name in wanted])

    # -- several plugins ----------------------------------------------------------------------------------------------

    @property
    def selected(self) -> bool:
        """Whether this is the plugin that ``prepare`` uses. See ``AcceleratorState.select_deepspeed_plugin``."""
        return self._selected

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Use this plugin from now on.

        Raises:
            RuntimeMisuse: the script calls this itself.
        """
        if not _from_accelerator_state:
            raise RuntimeMisuse(
                "DeepSpeedPlugin.select() is not for scripts: call accelerator.state.select_deepspeed_plugin(name)"
            )
        self._selected = True
        self.set_deepspeed_weakref()

    def is_zero3_init_enabled(self) -> bool:
        """The setting ``zero3_init_flag``."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Context in which models that transformers loads are, or are not, sharded as they are created."""
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """If the script has imported transformers, pass it the configuration: under ZeRO-3, ``from_pretrained`` then
        creates each layer as shards. Without transformers, this has no effect."""
        if "transformers" not in sys.modules:
            return
        from transformers.integrations import deepspeed

        integration: Any = deepspeed  # partly without types
        self._for_transformers = None
        integration.unset_hf_deepspeed_config()
        if self.zero3_init_flag:
            config = copy.deepcopy(self.deepspeed_config)
            for name, value in (("gradient_accumulation_steps", 1), ("train_micro_batch_size_per_gpu", 1)):
                if config.get(name, AUTO) == AUTO:
                    config[name] = value
            if config.get("train_batch_size") == AUTO:
                del config["train_batch_size"]
            self._for_transformers = integration.HfDeepSpeedConfig(config)
