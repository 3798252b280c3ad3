"""Memory that training a model takes on each GPU, by strategy and precision. Pure arithmetic on shapes.

Parameters, gradients and optimizer state are exact for torch's optimizers with DDP and FSDP2, in which each rank
stores ``ceil(rows / ranks)`` rows of every parameter (the largest rank counts). The rows ``zero1`` to ``zero3`` follow
the ZeRO paper (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054): mixed precision keeps 16-bit parameters and
gradients, and fp32 copies in the optimizer's state.

Activations follow Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198) for a transformer in 16 bits without
tensor parallelism, with s tokens, b samples, hidden size h, a heads and vocabulary size v: ``s b h (34 + 5 a s / h)``
bytes per layer, without the second term if the attention matrix is not stored (SDPA, FlashAttention); with
recomputation ``2 s b h`` per layer and one layer's activations; ``4 s b h (1 + v / h)`` for the output layer. fp32 is
taken as twice that. Working memory is a rough estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hpcaccel.launch.model_size import Architecture, ModelSize, ModelTensor

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "RESERVE_BYTES",
    "STRATEGIES",
    "Estimate",
    "TrainingSetup",
    "estimate",
    "estimates",
    "gpus_needed",
    "sequence_length",
]

PRECISIONS = ("fp32", "mixed", "bf16")
"""``mixed``: bf16 or fp16 autocast over fp32 parameters. ``bf16``: everything in bf16."""
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid")
OPTIMIZERS = ("adamw", "adamw-8bit", "adafactor", "sgd", "sgd-momentum")
RESERVE_BYTES = 2**30
"""Assumed for the device's context, libraries and communication buffers of a rank."""
_STEP_BYTES = 4
"""torch's optimizers count the steps of each parameter in an fp32 tensor."""
_BLOCK_8BIT, _LEAST_8BIT = 256, 4096
"""bitsandbytes: parameters for each scale, and the smallest tensor whose state is in 8 bits."""
_DEEPSPEED_BUCKET = 500_000_000
"""Parameters in DeepSpeed's reduce_bucket_size and allgather_bucket_size, by default."""
_LIVE_PARAMETERS = 1_000_000_000
"""stage3_max_live_parameters of DeepSpeed, by default."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """How a model is trained.

    Args:
        gpus: number of ranks, each with a GPU.
        gpus_per_node: ranks that share one copy of the model with ``hybrid``.
        batch: samples in a micro-batch of one rank.
        sequence: tokens in a sample; None: the model's maximum, at most 4,096.
        recomputes: whether activations are recomputed in the backward pass.
        stores_attention: whether the attention matrix is stored (``eager`` attention).
        cpu_offload: whether FSDP keeps parameters, gradients and optimizer state in CPU memory.
    """

    gpus: int = 1
    gpus_per_node: int = 1
    optimizer: str = "adamw"
    batch: int = 1
    sequence: int | None = None
    recomputes: bool = False
    stores_attention: bool = False
    cpu_offload: bool = False


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes per GPU, for the rank that needs the most."""

    strategy: str
    precision: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    """None: unknown."""
    working: int
    """Temporary in the forward and backward pass: gathered or cast parameters, buffers of collectives."""
    step: int
    """Temporary in the optimizer's step, when activations and working memory are free again."""
    on_host: int = 0
    """In CPU memory, for each rank."""

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Peak bytes, with ``RESERVE_BYTES`` for the device context; without activations if they are unknown."""
        return self.states + max((self.activations or 0) + self.working, self.step) + RESERVE_BYTES

    def fits(self, memory_bytes: int) -> bool:
        return self.total <= memory_bytes


def estimates(model: ModelSize, setup: TrainingSetup) -> list[Estimate]:
    """An estimate for each strategy and precision. ``hybrid`` is left out unless there are several nodes."""
    several = setup.gpus > setup.gpus_per_node > 1 and setup.gpus % setup.gpus_per_node == 0
    names = [one for one in STRATEGIES if one != "hybrid" or several]
    return [estimate(model, setup, strategy, precision) for strategy in names for precision in PRECISIONS]


def estimate(model: ModelSize, setup: TrainingSetup, strategy: str, precision: str) -> Estimate:
    """The estimate for one strategy and precision."""
    zero = strategy.startswith("zero")
    parts = (_zero if zero else _replicated_or_fsdp)(model, setup, strategy, precision)
    parameters, gradients, optimizer, working, step = parts
    on_host = 0
    if setup.cpu_offload and strategy in ("fsdp", "hybrid"):
        on_host, parameters, gradients, optimizer, step = parameters + gradients + optimizer, 0, 0, 0, 0
    return Estimate(
        strategy=strategy,
        precision=precision,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activation_bytes(model.architecture, setup, precision),
        working=working,
        step=step,
        on_host=on_host,
    )


_Parts = tuple[int, int, int, int, int]
"""Bytes of parameters, gradients, optimizer state, working memory and the step's intermediate values."""


def _replicated_or_fsdp(model: ModelSize, setup: TrainingSetup, strategy: str, precision: str) -> _Parts:
    width = 2 if precision == "bf16" else 4
    ranks = {"ddp": 1, "fsdp": setup.gpus, "hybrid": setup.gpus_per_node}[strategy]
    trained = [_shard(one.shape, ranks) for one in model.tensors if one.kind == "trained"]
    frozen = [_shard(one.shape, ranks) for one in model.tensors if one.kind == "frozen"]
    trained_count, frozen_count = _count(trained), _count(frozen)
    parameters = (trained_count + frozen_count) * width + _buffer_bytes(model, width)
    state = sum(_STATES[setup.optimizer](shape, width) for shape in trained)
    casts = trained_count * 2 if precision == "mixed" else 0  # autocast keeps 16-bit copies during a step
    working = casts if strategy == "ddp" else _gathered(model, 4 if precision == "fp32" else 2)
    return parameters, trained_count * width, state, working, _step_bytes(setup.optimizer, trained_count, width)


def _zero(model: ModelSize, setup: TrainingSetup, strategy: str, precision: str) -> _Parts:
    stage = int(strategy[-1])
    width = 4 if precision == "fp32" else 2
    state_width = 2 if precision == "bf16" else 4
    trained = sum(one.count for one in model.tensors if one.kind == "trained")
    part = math.ceil(trained / setup.gpus)
    whole = model.parameters
    parameters = (math.ceil(whole / setup.gpus) if stage == 3 else whole) * width + _buffer_bytes(model, width)
    gradients = (part if stage >= 2 else trained) * width
    flat = [_shard(one.shape, setup.gpus) for one in model.tensors if one.kind == "trained"]
    if setup.optimizer == "adafactor":
        state = sum(_STATES["adafactor"](shape, state_width) for shape in flat)
    else:
        state = _STATES[setup.optimizer]((part,), state_width)  # one flat tensor
    if precision == "mixed":
        state += part * 4
    working = min(_DEEPSPEED_BUCKET, trained) * width
    working += min(_LIVE_PARAMETERS if stage == 3 else _DEEPSPEED_BUCKET, whole) * width
    if setup.gpus == 1:
        working = 0
    return parameters, gradients, state, working, _step_bytes(setup.optimizer, part, state_width)


Shape = tuple[int, ...]


def _shard(shape: Shape, ranks: int) -> Shape:
    """The part of a parameter that the rank with the most rows stores, including FSDP2's padding."""
    return (math.ceil(shape[0] / ranks), *shape[1:]) if shape else shape


def _count(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _buffer_bytes(model: ModelSize, width: int) -> int:
    def size(one: ModelTensor) -> int:
        return one.count * min(width, one.stored_bytes // max(1, one.count)) if one.is_float else one.stored_bytes

    return sum(size(one) for one in model.tensors if one.kind == "buffer")


def _gathered(model: ModelSize, width: int) -> int:
    """Parameters that FSDP2 holds gathered at once: those outside of repeated blocks, two blocks (one is prefetched),
    and the gradients of one block."""
    blocks = model.blocks()
    outside = blocks.pop("")
    return (outside + 3 * max(blocks.values(), default=0)) * width


def _adamw(shape: Shape, width: int) -> int:
    return 2 * math.prod(shape) * width + _STEP_BYTES


def _adamw_8bit(shape: Shape, width: int) -> int:
    count = math.prod(shape)
    if count < _LEAST_8BIT:
        return 2 * count * 4
    return 2 * (count + math.ceil(count / _BLOCK_8BIT) * 4)


def _adafactor(shape: Shape, width: int) -> int:
    if len(shape) < 2:
        return math.prod(shape) * width + _STEP_BYTES
    count = math.prod(shape)
    return (count // max(1, shape[-1]) + count // max(1, shape[-2])) * width + _STEP_BYTES


_STATES: dict[str, Callable[[Shape, int], int]] = {
    "adamw": _adamw,
    "adamw-8bit": _adamw_8bit,
    "adafactor": _adafactor,
    "sgd": lambda shape, width: 0,
    "sgd-momentum": lambda shape, width: math.prod(shape) * width,
}
"""Bytes of the state for a tensor of a shape, given the bytes of an element of a parameter."""


def _step_bytes(optimizer: str, count: int, width: int) -> int:
    """Intermediate values of a step. On GPUs, torch's AdamW computes those of all parameters at once (foreach)."""
    return count * width if optimizer == "adamw" else 0


def activation_bytes(architecture: Architecture | None, setup: TrainingSetup, precision: str) -> int | None:
    """Bytes of activations that a rank keeps for the backward pass; None if the formula does not apply."""
    if architecture is None:
        return None
    sequence = sequence_length(architecture, setup)
    if sequence is None:
        return None
    tokens = sequence * setup.batch * architecture.hidden
    layer = 34 * tokens
    if setup.stores_attention:
        layer += 5 * architecture.heads * sequence**2 * setup.batch
    layers = 2 * tokens * architecture.layers + layer if setup.recomputes else layer * architecture.layers
    output = 4 * tokens + 4 * sequence * setup.batch * architecture.vocabulary if architecture.vocabulary else 0
    return (layers + output) * (2 if precision == "fp32" else 1)


def sequence_length(architecture: Architecture, setup: TrainingSetup) -> int | None:
    """Tokens in a sample: the given number, else the model's maximum, at most 4,096; None if both are unknown."""
    if setup.sequence is not None:
        return setup.sequence
    longest = architecture.longest_sequence
    return None if longest is None else min(longest, 4096)


def gpus_needed(
    model: ModelSize, setup: TrainingSetup, precision: str, memory_bytes: int, *, most: int = 4096
) -> int | None:
    """The smallest number of GPUs with which strategy fsdp fits, of those of one node times 1, 2, 4 … up to ``most``;
    None if none of these is enough."""
    gpus = setup.gpus_per_node
    while gpus <= most:
        if estimate(model, replace(setup, gpus=gpus), "fsdp", precision).fits(memory_bytes):
            return gpus
        gpus *= 2
    return None
