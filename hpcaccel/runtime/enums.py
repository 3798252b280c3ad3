"""Enums for training scripts: distributed types, precisions, trackers, random generators, compiler backends.

Members have the same values as in Accelerate, and are equal to these values as strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, EnumMeta
from typing import Any

__all__ = [
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DistributedType",
    "DynamoBackend",
    "LoggerType",
    "PrecisionType",
    "RNGType",
    "of_strategy",
]


class _Values(EnumMeta):
    def __contains__(cls, item: object) -> bool:
        return item in cls.list()

    def list(cls) -> list[str]:
        """All values."""
        members: Mapping[str, Any] = cls.__members__
        return [str(member) for member in members.values()]


class NameEnum(str, Enum, metaclass=_Values):
    """An enum whose members are equal to their values: ``PrecisionType.BF16 == "bf16"``, and
    ``"bf16" in PrecisionType``."""

    def __str__(self) -> str:
        return str(self.value)


class DistributedType(NameEnum):
    """How the ranks of a training are distributed. TPU is an alias of XLA."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


def of_strategy(strategy: str, otherwise: DistributedType) -> DistributedType:
    """The type that the strategy has for any ranks and devices, else ``otherwise``."""
    return {"fsdp": DistributedType.FSDP, "deepspeed": DistributedType.DEEPSPEED}.get(strategy, otherwise)


class PrecisionType(NameEnum):
    """Precision of the forward pass. ``no`` means full precision."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class CustomDtype(Enum):
    """Dtypes for the sizes of a model's weights that torch does not have."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class LoggerType(NameEnum):
    """Names of trackers."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class RNGType(NameEnum):
    """Kinds of random generators: torch's on the CPU, those of devices, and GENERATOR, the sampler's own."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class DynamoBackend(NameEnum):
    """Backends of ``torch.compile``. ``NO`` means that models are not compiled."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class DDPCommunicationHookType(NameEnum):
    """How DDP compresses gradients for communication."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class ComputeEnvironment(NameEnum):
    """Compute environments that an Accelerate config file can name."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"
