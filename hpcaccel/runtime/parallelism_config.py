"""``ParallelismConfig``, the mesh of ranks that a script requests, and the settings of its dimensions.

Fields have the same names as in Accelerate 1.15. Values that the script does not give come from the variables
``PARALLELISM_CONFIG_*``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcaccel.errors import RuntimeMisuse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "DeepSpeedSequenceParallelConfig", "ParallelismConfig", "TorchContextParallelConfig", "TorchTensorParallelConfig",
    "join_dimensions", "sequence_size", "shards_model",
]  # fmt: skip

_VARIABLES = "PARALLELISM_CONFIG_"
_DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""From the outermost to the innermost."""
_ATTENTION = ("flash_attention_2", "flash_attention_3", "sdpa")
"""Implementations of attention that Ulysses can distribute, beside those from the hub."""
_JOINED: dict[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}
"""Accelerate's joint dimensions of the mesh."""


def _variable(name: str) -> str | None:
    """The variable's value; None if it is empty, or in a run, whose settings come from the spec."""
    return None if os.environ.get("HPCACCEL_RUN_DIR") else os.environ.get(_VARIABLES + name.upper()) or None


def _whole(name: str) -> int | None:
    text = _variable(name)
    if text is not None and not text.strip().isdigit():
        raise RuntimeMisuse(f"{_VARIABLES}{name.upper()}={text!r} must be a whole number")
    return None if text is None else int(text)


@dataclass
class TorchTensorParallelConfig:
    """Asynchronous tensor parallelism. Accepted for compatibility, but has no effect."""

    enable_async_tp: bool = False


@dataclass
class TorchContextParallelConfig:
    """How attention exchanges keys and values between the ranks of a context-parallel group.

    Args:
        cp_comm_strategy: ``allgather``, each rank receives all keys and values at once, or ``alltoall``, they are
            passed around a ring, which needs less memory. By default ``PARALLELISM_CONFIG_CP_COMM_STRATEGY``, else
            ``allgather``. On CPUs they are gathered in either case.

    Raises:
        RuntimeMisuse: another strategy.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        self.cp_comm_strategy = self.cp_comm_strategy or _variable("cp_comm_strategy") or "allgather"
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise RuntimeMisuse(
                f"cp_comm_strategy={self.cp_comm_strategy!r} is not a valid value (allowed: allgather, alltoall)"
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """How DeepSpeed splits sequences (Ulysses). Values that are None come from ``PARALLELISM_CONFIG_SP_*``.

    Args:
        sp_seq_length: number of tokens of a whole sequence, if it is the same in all batches.
        sp_seq_length_is_variable: whether the length differs between batches; by default it does.
        sp_attn_implementation: ``sdpa``, ``flash_attention_2``, ``flash_attention_3``, or a flash attention from the
            hub (``kernels-community/flash-attn2``); it must be the model's. By default it is the model's.

    Raises:
        RuntimeMisuse: the length is fixed and not given, or another implementation of attention is named.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = (_variable("sp_seq_length_is_variable") or "true").lower() == "true"
        if self.sp_seq_length is None and _variable("sp_seq_length") != "None":
            self.sp_seq_length = _whole("sp_seq_length")
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise RuntimeMisuse(
                "DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False) needs the length: set sp_seq_length, "
                f"or {_VARIABLES}SP_SEQ_LENGTH"
            )
        self.sp_attn_implementation = self.sp_attn_implementation or _variable("sp_attn_implementation")
        name = self.sp_attn_implementation
        from_hub = name is not None and "/" in name and "flash-attn" in name
        if name is not None and name not in _ATTENTION and not from_hub:
            raise RuntimeMisuse(
                f"sp_attn_implementation={name!r}: DeepSpeed cannot split its sequences (allowed: "
                f"{', '.join(_ATTENTION)}, and a flash-attn kernel of the hub, as in kernels-community/flash-attn2)"
            )


@dataclass
class ParallelismConfig:
    """The mesh of ranks: replicas of the model, shards of each replica, ranks that split sequences, and tensor-parallel
    ranks.

    Sizes that are None come from ``PARALLELISM_CONFIG_*``, the run's spec and other plugins. If those do not set a
    data-parallel size, it follows from the number of ranks (with FSDP as many shards as possible, else replicas only).
    Other unset sizes are 1. ``cp_size`` or ``dp_shard_size`` above 1 selects strategy ``fsdp``, unless the script
    passes another one. ``tp_handler`` has no effect.

    Args:
        cp_size: number of neighbouring ranks that split the sequences of one batch (``maybe_context_parallel``).
        cp_handler: by default ``TorchContextParallelConfig()``.
        sp_size: number of neighbouring ranks whose sequences DeepSpeed splits; needs strategy ``deepspeed``.
        sp_handler: by default ``DeepSpeedSequenceParallelConfig()``.

    Raises:
        RuntimeMisuse: a size is below 1; ``cp_size`` and ``sp_size`` are both above 1; a backend is not the
            supported one; ``cp_handler`` is of another class.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None

    device_mesh = None
    """The mesh, once it has been built. No field: two equal configurations may have different meshes."""

    def __post_init__(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            if getattr(self, name) is None:
                setattr(self, name, _whole(name))
            size = getattr(self, name)
            if size is not None and size < 1:
                raise RuntimeMisuse(f"ParallelismConfig({name}={size}): {name} must be at least 1")
        for name, only in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            if getattr(self, name) is None:
                setattr(self, name, _variable(name) or only)
            if getattr(self, name) != only:
                raise RuntimeMisuse(f"ParallelismConfig({name}={getattr(self, name)!r}): {name} must be {only!r}")
        if self.cp_enabled and self.sp_enabled:
            raise RuntimeMisuse(
                f"ParallelismConfig(cp_size={self.cp_size}, sp_size={self.sp_size}): sequences are split by torch "
                "(cp_size, with strategy fsdp or ddp) or by DeepSpeed (sp_size). Set one of them to 1"
            )
        if self.cp_enabled and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig()
        if self.sp_enabled and self.sp_handler is None:
            self.sp_handler = DeepSpeedSequenceParallelConfig()
        if self.cp_handler is not None and not isinstance(self.cp_handler, TorchContextParallelConfig):
            raise RuntimeMisuse(f"ParallelismConfig(cp_handler={self.cp_handler!r}): pass a TorchContextParallelConfig")

    def _size(self, dimension: str) -> int:
        return getattr(self, f"{dimension}_size") or 1

    def _enabled(self, *dimensions: str) -> list[str]:
        return [name for name in dimensions if self._size(name) > 1]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several copies of the model."""
        return self._size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded over data-parallel ranks."""
        return self._size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether tensors are split over ranks."""
        return self._size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split over ranks by context parallelism."""
        return self._size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split over ranks by DeepSpeed's sequence parallelism."""
        return self._size("sp") > 1

    @property
    def total_size(self) -> int:
        """Product of all sizes."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks with different batches."""
        return self._size("dp_replicate") * self._size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that work on one batch."""
        return self._size("tp") * self._size("cp") * self._size("sp")

    @property
    def dp_dim_names(self) -> list[str]:
        """The enabled mesh dimensions whose ranks have different batches."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The enabled mesh dimensions whose ranks share a batch."""
        return self._enabled("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Dimensions over which parameters are sharded."""
        return self._enabled("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Dimensions over which losses are averaged."""
        return self._enabled("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The mesh dimensions that FSDP uses."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All enabled mesh dimensions."""
        return self.dp_dim_names + self.non_dp_dim_names

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Create the mesh of the sizes above 1, with Accelerate's joint dimensions; a collective call.

        Returns:
            None if all sizes are 1, and with sequence parallelism, for which DeepSpeed forms its own groups.
        """
        from torch.distributed.device_mesh import init_device_mesh

        names = self._enabled(*_DIMENSIONS)
        if not names or self.sp_enabled:
            return None
        mesh = init_device_mesh(device_type, tuple(map(self._size, names)), mesh_dim_names=tuple(names))
        join_dimensions(mesh)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The mesh that the Accelerator or an earlier call has built, else a new one.

        Raises:
            RuntimeMisuse: there is no mesh yet and no ``device_type``, or the mesh is of another device type.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise RuntimeMisuse("get_device_mesh(): the mesh has not been built yet. Pass a device type: 'cuda'")
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type not in (None, self.device_mesh.device_type):
            raise RuntimeMisuse(
                f"get_device_mesh({device_type!r}): the mesh has been built for {self.device_mesh.device_type!r}"
            )
        return self.device_mesh


def join_dimensions(mesh: DeviceMesh) -> None:
    """Add the joint dimensions that scripts for Accelerate read, such as ``dp_cp``; a collective call."""
    present = mesh.mesh_dim_names or ()
    for name, parts in _JOINED.items():
        found = tuple(part for part in parts if part in present)
        if found and hasattr(mesh, "_flatten"):
            mesh[found]._flatten(name)


def shards_model(config: Any) -> bool:
    """Whether the sizes require sharding: ``dp_shard_size`` or ``cp_size`` above 1, if DeepSpeed does not split the
    sequences."""
    return config is not None and sequence_size(config) == 1 and max(config.dp_shard_size or 1, config.cp_size or 1) > 1


def sequence_size(config: Any) -> int:
    """Number of ranks whose sequences DeepSpeed splits."""
    return 1 if config is None else config.sp_size or 1
