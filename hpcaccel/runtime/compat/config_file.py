"""Accelerate's configuration file in scripts: reading and writing it, and a file for this machine's devices.

``hpcaccel launch`` reads the file with ``hpcaccel.launch.launch_config``, which also checks the values.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from hpcaccel.core.default_config import (
    CONFIG_NAMES,
    PRECISIONS,
    basic_config,
    config_folder,
    default_config_path,
    to_json,
)
from hpcaccel.core.durable_files import atomic_write
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.enums import ComputeEnvironment, DistributedType

__all__ = [
    "ClusterConfig",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "load_config_from_file",
    "write_basic_config",
]

default_yaml_config_file = str(default_config_path())
"""Path of the file in Accelerate's folder, which may hold JSON, too."""
default_json_config_file = default_yaml_config_file
default_config_file = next(
    (str(path) for path in map(config_folder().joinpath, CONFIG_NAMES) if path.is_file()), default_yaml_config_file
)
"""Path of the file that exists; if there is none, ``default_yaml_config_file``."""


@dataclass
class ClusterConfig:
    """The content of a configuration file, by the file's keys. Sections that are absent are empty."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType
    mixed_precision: str | None
    use_cpu: bool
    debug: bool
    num_processes: int = -1
    """All processes, on all machines; -1 if the launcher's command line gives the number."""
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] = field(default_factory=dict)
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    fsdp_config: dict[str, Any] = field(default_factory=dict)
    parallelism_config: dict[str, Any] = field(default_factory=dict)
    megatron_lm_config: dict[str, Any] = field(default_factory=dict)
    mpirun_config: dict[str, Any] = field(default_factory=dict)
    downcast_bf16: bool | str = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        self.distributed_type = DistributedType(self.distributed_type)
        for name in self.__dict__:
            if name.endswith("_config") and getattr(self, name) is None:
                setattr(self, name, {})

    def to_dict(self) -> dict[str, Any]:
        """The keys and plain values of the file, without those that are None or empty sections."""
        return {name: _plain(value) for name, value in self.__dict__.items() if value is not None and value != {}}

    @classmethod
    def from_yaml_file(cls, yaml_file: str | os.PathLike[str] | None = None) -> ClusterConfig:
        """Read a YAML file; by default the one in Accelerate's folder. Raises RuntimeMisuse as
        ``load_config_from_file``."""
        import yaml

        path = Path(yaml_file or default_yaml_config_file)
        try:
            return cls._from(yaml.safe_load(_text(path)), path)
        except yaml.YAMLError as error:
            raise RuntimeMisuse(f"{path} is not valid YAML: {error}") from None

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str] | None = None) -> ClusterConfig:
        """Read a JSON file; by default the one in Accelerate's folder. Raises RuntimeMisuse as
        ``load_config_from_file``."""
        path = Path(json_file or default_json_config_file)
        try:
            return cls._from(json.loads(_text(path)), path)
        except json.JSONDecodeError as error:
            raise RuntimeMisuse(f"{path} is not valid JSON: {error}") from None

    def to_yaml_file(self, yaml_file: str | os.PathLike[str]) -> None:
        """Write the file as YAML, atomically."""
        import yaml

        atomic_write(Path(yaml_file), yaml.safe_dump(self.to_dict()), mode=0o644)

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        """Write the file as JSON, atomically."""
        atomic_write(Path(json_file), to_json(self.to_dict()), mode=0o644)

    @classmethod
    def _from(cls, values: Any, path: Path) -> ClusterConfig:
        if not isinstance(values, dict) or "distributed_type" not in values:
            raise RuntimeMisuse(
                f"{path} is not a configuration file: it has no distributed_type. Write one with `hpcaccel config`"
            )
        if values.get("compute_environment") == "AMAZON_SAGEMAKER":
            raise RuntimeMisuse(f"{path}: compute_environment AMAZON_SAGEMAKER: hpcaccel starts no jobs on SageMaker")
        # YAML reads an unquoted `no` as false.
        plain = {key: "no" if key in _WORDS and value is False else value for key, value in values.items()}
        plain["distributed_type"] = str(plain["distributed_type"]).upper()
        if plain.pop("fp16", False):
            plain.setdefault("mixed_precision", "fp16")
        if str(backend := plain.pop("dynamo_backend", "no")).upper() != "NO":
            plain.setdefault("dynamo_config", {"dynamo_backend": backend})
        if plain["distributed_type"] == "NO":
            plain.setdefault("num_processes", 1)
        if unknown := sorted(str(key) for key in plain.keys() - {one.name for one in fields(cls)}):
            raise RuntimeMisuse(f"{path}: unknown keys: {', '.join(unknown)}. Remove them")
        plain = _ABSENT | plain
        for key, kind in (("compute_environment", ComputeEnvironment), ("distributed_type", DistributedType)):
            allowed = [one.value for one in kind]
            if plain[key] not in allowed:
                raise RuntimeMisuse(f"{path}: {key} {plain[key]!r} is not valid (allowed: {', '.join(allowed)})")
        return cls(**plain)


_WORDS = ("distributed_type", "mixed_precision", "dynamo_backend")
_ABSENT = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": None, "use_cpu": False, "debug": False}
"""Values of the keys that older files do not have."""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RuntimeMisuse(f"cannot read the configuration file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RuntimeMisuse(f"cannot read the configuration file {path}: {error}") from None


def _plain(value: Any) -> Any:
    """The value with plain values in place of enums' members."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value.value if isinstance(value, Enum) else value


def load_config_from_file(config_file: str | None) -> ClusterConfig:
    """Read a configuration file, as JSON if its name ends in ``.json``, else as YAML.

    Args:
        config_file: the path; None: ``default_config_file``.

    Raises:
        RuntimeMisuse: the file cannot be read or parsed; it has no ``distributed_type``, a type or environment that
            does not exist, or unknown keys; or it is for SageMaker.
    """
    path = str(default_config_file if config_file is None else config_file)
    return ClusterConfig.from_json_file(path) if path.endswith(".json") else ClusterConfig.from_yaml_file(path)


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write the file that ``hpcaccel config default`` writes, which ``hpcaccel launch`` and ``accelerate launch`` read.

    Args:
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``, in any case.
        save_location: the file. Default: Accelerate's, in ``$HF_HOME/accelerate``.

    Returns:
        The file's path; False if it exists already, which is then kept, with a message.

    Raises:
        RuntimeMisuse: an unknown precision.
    """
    from hpcaccel.runtime.distributed import device_backend

    path = default_config_path() if save_location is None else Path(save_location)
    if path.exists():
        print(f"{path} already exists and is kept. `hpcaccel config` makes a new one")
        return False
    precision = str(mixed_precision).lower()
    if precision not in PRECISIONS:
        raise RuntimeMisuse(f"mixed_precision={mixed_precision!r} is not valid (allowed: {', '.join(PRECISIONS)})")
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = device_backend.accelerator()
    atomic_write(path, to_json(basic_config(precision, kind, device_backend.device_count(kind))), mode=0o644)
    return path
