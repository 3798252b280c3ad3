"""Checks of packages, versions, devices and the machine: ``is_wandb_available()``, ``compare_versions()`` and others.

A package is available if the import system finds it; it is not imported. A folder with the package's name but without
code does not count.
"""

from __future__ import annotations

import logging
import operator
import platform
import re
import socket
import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib import metadata
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion

from hpcaccel.errors import RuntimeMisuse

__all__ = [
    "PackageMissing",
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "check_os_kernel",
    "compare_versions",
    "deepspeed_required",
    "get_current_device_type",
    "is_available",
    "is_port_in_use",
    "is_torch_version",
    "require",
    "torchao_required",
]

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
"""Import names of packages, by the name in ``is_<name>_available``."""
NEEDS = {"4bit_bnb": "0.39.0", "8bit_bnb": "0.37.2", "bitsandbytes_multi_backend": "0.44.0"}
"""Minimum versions of packages, by the same names."""

BACKENDS = {
    "hpu": "habana_frameworks.torch",
    "mlu": "torch_mlu",
    "musa": "torch_musa",
    "neuron": "torch_neuronx",
    "npu": "torch_npu",
    "sdaa": "torch_sdaa",
    "torch_xla": "torch_xla",
}
"""Packages that extend torch for another vendor's devices, by kind of device."""


@cache
def found(package: str) -> bool:
    """Whether an import would find the package."""
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # the parent package is missing
        return False
    return spec is not None and spec.origin is not None


FACTS: dict[str, Callable[[], bool]] = {
    "bf16": lambda: torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True,
    "cuda": torch.cuda.is_available,
    "fp16": lambda: torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available(),
    "fp8": lambda: any(is_available(name) for name in ("msamp", "transformer_engine", "torchao")),
    "mps": torch.backends.mps.is_available,
    "pippy": lambda: is_torch_version(">=", "2.7.0"),  # see build_pipeline
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
    """Whether a kind of device, or a package with at least ``min_version``, is available.

    Args:
        name: a key of ``PACKAGES``, ``BACKENDS`` or ``FACTS``.

    Raises:
        KeyError: no table has this name.
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
    """Always False: hpcaccel does not support the first Gaudi."""
    return False


def __getattr__(name: str) -> Any:
    key = name.removeprefix("is_").removesuffix("_available")
    if name != f"is_{key}_available" or not (key in PACKAGES or key in BACKENDS or key in FACTS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def check(min_version: str | None = None, **_: Any) -> bool:
        return is_available(key, min_version if isinstance(min_version, str) else None)

    check.__name__ = check.__qualname__ = name
    check.__doc__ = f"Whether {key} is available."
    globals()[name] = check
    return check


class PackageMissing(RuntimeMisuse, ImportError):
    """A package that a function needs is not installed, or too old. Accelerate raises ImportError."""


def require(package: str, user: str, *, install: str = "", at_least: str = "") -> None:
    """Check that a package is installed.

    Args:
        package: its import name.
        user: what needs it, for the error message.
        install: what pip installs; default: ``package``.
        at_least: the oldest version that can be used.

    Raises:
        PackageMissing: it is not, or it is older.
    """
    if not found(package):
        raise PackageMissing(f"{user} needs {package}, which is not installed: pip install {install or package}")
    if at_least and not compare_versions(package, ">=", at_least):
        raise PackageMissing(
            f"{user} needs {package}>={at_least}, but {metadata.version(package)} is installed: pip install "
            f"{install or package}"
        )


def _required(package: str) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            require(package, function.__qualname__)
            return function(*args, **kwargs)

        return guarded  # type: ignore[return-value]

    return decorate


def deepspeed_required(function: Function) -> Function:
    """Decorator: calls to ``function`` raise ImportError if deepspeed is not installed."""
    return _required("deepspeed")(function)


def torchao_required(function: Function) -> Function:
    """Decorator: calls to ``function`` raise ImportError if torchao is not installed."""
    return _required("torchao")(function)


STR_OPERATION_TO_FUNC = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare the version of an installed package, or a given version, with ``requirement_version``.

    Args:
        library_or_version: a package's name, or a version.
        operation: one of ``> >= == != <= <``.

    Raises:
        RuntimeMisuse: ``operation`` is unknown.
        importlib.metadata.PackageNotFoundError: the package is not installed.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        allowed = " ".join(STR_OPERATION_TO_FUNC)
        raise RuntimeMisuse(f"compare_versions(): unknown operation {operation!r} (allowed: {allowed})")
    if isinstance(library_or_version, str) and not library_or_version[:1].isdigit():
        library_or_version = metadata.version(library_or_version)
    compare = STR_OPERATION_TO_FUNC[operation]
    return bool(compare(TorchVersion(str(library_or_version)), TorchVersion(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version, without its local part (``+cu128``), with ``version``."""
    return compare_versions(torch.__version__.partition("+")[0], operation, version)


KERNEL = (5, 5)
"""Oldest Linux kernel without the hangs in multi-process training about which Accelerate warns."""


def kernel_problem() -> str | None:
    """A sentence about this Linux kernel if training processes may hang on it, else None."""
    release = platform.release()
    found = re.match(r"(\d+)\.(\d+)", release)
    if platform.system() == "Linux" and found and (int(found[1]), int(found[2])) < KERNEL:
        return f"Linux kernel {release} is older than {KERNEL[0]}.{KERNEL[1]}: training processes may hang"
    return None


def check_os_kernel() -> None:
    """Log a warning if training processes may hang on this Linux kernel."""
    if (problem := kernel_problem()) is not None:
        logging.getLogger(__name__).warning("%s. Use a newer kernel", problem)


def is_port_in_use(port: int | None = None) -> bool:
    """Whether a process on this machine listens on ``port`` (default: 29500, as in torchrun)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_current_device_type() -> tuple[str, str]:
    """This machine's kind of device, and the DistributedType of several ranks; ``("cuda", "MULTI_GPU")`` without an
    accelerator."""
    from hpcaccel.runtime.distributed import device_backend

    kind = device_backend.accelerator()
    return (kind, str(device_backend.distributed_type(torch.device(kind)))) if kind != "cpu" else ("cuda", "MULTI_GPU")


@cache
def check_cuda_fp8_capability() -> bool:
    """Whether this process's GPU supports fp8: compute capability 8.9 or higher.

    Raises:
        RuntimeError, AssertionError: there is no GPU, or torch is built without CUDA (raised by torch).
    """
    return torch.cuda.get_device_capability() >= (8, 9)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """The libraries among ``library_names`` that this process has imported."""
    return [name for name in library_names if name in sys.modules]
