"""Whether an optional package or a kind of device is here: ``is_wandb_available()`` and its like, from one table.

A package counts when it can be found; it is not imported. A folder that only bears its name does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import metadata
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from hpcaccel.runtime.compat.version_checks import compare_versions

__all__ = ["deepspeed_required", "is_available", "torchao_required"]

Function = TypeVar("Function", bound=Callable[..., Any])

PACKAGES = {
    "4bit_bnb": "bitsandbytes",
    "8bit_bnb": "bitsandbytes",
    "aim": "aim",
    "amdsmi": "amdsmi",
    "bitsandbytes_multi_backend": "bitsandbytes",
    "bnb": "bitsandbytes",
    "boto3": "boto3",
    "clearml": "clearml",
    "comet_ml": "comet_ml",
    "datasets": "datasets",
    "deepspeed": "deepspeed",
    "dvclive": "dvclive",
    "import_timer": "import_timer",
    "lomo": "lomo_optim",
    "matplotlib": "matplotlib",
    "megatron_lm": "megatron.training",
    "mlflow": "mlflow",
    "msamp": "msamp",
    "pandas": "pandas",
    "peft": "peft",
    "pynvml": "pynvml",
    "pytest": "pytest",
    "rich": "rich",
    "sagemaker": "sagemaker",
    "schedulefree": "schedulefree",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "timm": "timm",
    "torchao": "torchao",
    "torchdata": "torchdata",
    "torchvision": "torchvision",
    "tqdm": "tqdm",
    "trackio": "trackio",
    "transformer_engine": "transformer_engine",
    "transformers": "transformers",
    "triton": "triton",
    "wandb": "wandb",
}
NEEDS = {"4bit_bnb": "0.39.0", "8bit_bnb": "0.37.2", "bitsandbytes_multi_backend": "0.44.0"}

BACKENDS = {
    "hpu": "habana_frameworks.torch",
    "mlu": "torch_mlu",
    "musa": "torch_musa",
    "neuron": "torch_neuronx",
    "npu": "torch_npu",
    "sdaa": "torch_sdaa",
    "torch_xla": "torch_xla",
}
"""Devices whose torch comes from somebody else; the package tells."""


@cache
def found(package: str) -> bool:
    """Whether an import would find the package: a folder of its name without code in it is not the package."""
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # of the package around it
        return False
    return spec is not None and spec.origin is not None


FACTS: dict[str, Callable[[], bool]] = {
    "bf16": lambda: torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True,
    "cuda": torch.cuda.is_available,
    "fp16": lambda: torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available(),
    "fp8": lambda: any(is_available(name) for name in ("msamp", "transformer_engine", "torchao")),
    "mps": torch.backends.mps.is_available,
    "pippy": lambda: True,
    "rocm": lambda: torch.version.hip is not None and torch.cuda.is_available(),
    "torchdata_stateful_dataloader": lambda: found("torchdata") and compare_versions("torchdata", ">=", "0.8.0"),
    "transformer_engine_mxfp8": lambda: (
        found("transformer_engine") and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
    ),
    "weights_only": lambda: True,
    "xccl": lambda: bool(getattr(torch.distributed.distributed_c10d, "is_xccl_available", lambda: False)()),
    "xpu": torch.xpu.is_available,
}


def is_available(name: str, min_version: str | None = None) -> bool:
    """Whether ``name`` of one of the tables is here, in this version or a later one.

    Raises:
        KeyError: no table has it.
    """
    if name in FACTS:
        return FACTS[name]()
    package = PACKAGES[name] if name in PACKAGES else BACKENDS[name]
    wanted = min_version or NEEDS.get(name)
    if not found(package):
        return False
    try:
        return wanted is None or compare_versions(package.partition(".")[0], ">=", wanted)
    except metadata.PackageNotFoundError:  # code without a distribution has no version
        return False


def is_habana_gaudi1() -> bool:
    """Never: the first Gaudi is not driven here."""
    return False


def __getattr__(name: str) -> Any:
    key = name.removeprefix("is_").removesuffix("_available")
    if name != f"is_{key}_available" or not (key in PACKAGES or key in BACKENDS or key in FACTS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def check(min_version: str | None = None, **_: Any) -> bool:
        return is_available(key, min_version if isinstance(min_version, str) else None)

    check.__name__ = check.__qualname__ = name
    check.__doc__ = f"Whether {key} is here."
    globals()[name] = check
    return check


def _required(package: str) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not found(package):
                raise ImportError(f"{function.__qualname__} needs {package}: pip install {package}")
            return function(*args, **kwargs)

        return guarded  # type: ignore[return-value]

    return decorate


def deepspeed_required(function: Function) -> Function:
    """Calls of ``function`` say so where deepspeed is not installed."""
    return _required("deepspeed")(function)


def torchao_required(function: Function) -> Function:
    """Calls of ``function`` say so where torchao is not installed."""
    return _required("torchao")(function)
