"""Settings of this process, and the places where it writes.

Arguments of ``Accelerator(...)`` override the settings in the run directory's ``spec.json`` or, outside a run, in
environment variables. Those override the defaults below.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.launch_spec import LaunchSpec, launch_of
from hpcaccel.core.rank_protocol import PROTOCOL
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RankEnvironmentError, RuntimeMisuse

__all__ = ["OWN", "SHARED", "OutputLocation", "Settings", "load", "locate"]

_ALLOWED = {
    "strategy": ("ddp", "fsdp", "deepspeed"),
    "mixed_precision": ("no", "fp16", "bf16", "fp8"),
    "stop": ("cooperative", "signals"),
    "when_busy": ("wait", "skip"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a rank: from the spec's ``runtime`` and ``checkpoint`` sections, and from ``Accelerator(...)``."""

    strategy: str = "ddp"
    mixed_precision: str = "no"
    gradient_accumulation_steps: int = 1
    seed: int | None = None
    deterministic: bool = False
    stop: str = "cooperative"
    fsdp_wrap: tuple[str, ...] = ()
    """Class names of the blocks that FSDP2 shards one by one. If empty, these are the model's repeated blocks."""
    reshard_after_forward: bool = True
    fsdp_shard_size: int | None = None
    """Number of ranks over which each replica is sharded; None means as many as possible."""
    fsdp_param_dtype: str | None = None
    fsdp_reduce_dtype: str | None = None
    fsdp_output_dtype: str | None = None
    fsdp_cpu_offload: bool = False
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Settings of strategy deepspeed: ``config_file``, or ``zero_stage`` and others."""
    activation_checkpointing: bool = False
    compile: bool = False
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    split_batches: bool = False
    even_batches: bool = True
    dispatch_batches: bool | None = None
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    use_stateful_dataloader: bool = False
    device_placement: bool = True
    non_blocking: bool = False
    rng_types: tuple[str, ...] = ("generator",)
    fp32_outputs: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    step_scheduler_with_optimizer: bool = True
    step_scheduler_per_process: bool = True
    adjust_scheduler: bool = True
    debug: bool = False
    timeout_seconds: float = 1800.0
    """Timeout of the script's collectives and of gradient communication."""
    control_timeout_seconds: float = 60.0
    """How long ranks wait for each other before a load, before the save of a sharded model, and after a rank has run
    out of memory."""
    save_wait_seconds: float = 5.0
    """How long rank 0 waits for the other ranks in ``save_state`` if the model is not sharded."""
    every_steps: int | None = None
    every_minutes: float | None = None
    background: bool = True
    """Whether periodic checkpoints are written while the training continues."""
    when_busy: str = "wait"
    snapshot_every_steps: int | str | None = None
    """Steps between snapshots in the memory of the nodes, or ``auto``; None: none are taken."""
    snapshot_replicas: int = 0
    keep: int | None = 2
    keep_every_steps: int | None = None
    resume: str = "auto"


OWN = frozenset(
    {
        "gradient_accumulation_steps",
        "split_batches",
        "even_batches",
        "dispatch_batches",
        "use_seedable_sampler",
        "data_seed",
        "use_stateful_dataloader",
        "device_placement",
        "non_blocking",
        "rng_types",
        "fp32_outputs",
        "sync_with_dataloader",
        "sync_each_batch",
        "step_scheduler_with_optimizer",
        "step_scheduler_per_process",
        "adjust_scheduler",
    }
)
"""Settings that each Accelerator has for itself."""

SHARED = frozenset(item.name for item in fields(Settings)) - OWN
"""Settings that all Accelerators of a process share."""


@dataclass(frozen=True)
class OutputLocation:
    """Where this process writes: the run directory, else the script's project directory, if it has one."""

    run: RunDir | None = None
    attempt: int = 0
    project: Path | None = None

    @property
    def checkpoints(self) -> Path | None:
        if self.run is not None:
            return self.run.checkpoints
        return None if self.project is None else self.project / "checkpoints"

    @property
    def metrics(self) -> Path | None:
        if self.run is not None:
            return self.run.metrics
        return None if self.project is None else self.project / "metrics.jsonl"


def locate(project_dir: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ) -> OutputLocation:
    """Where this process writes, according to the launcher's variables and the script's ``project_dir``."""
    path = environ.get("HPCACCEL_RUN_DIR")
    project = None if project_dir is None else Path(project_dir).absolute()
    if not path:
        return OutputLocation(project=project)
    return OutputLocation(run=RunDir(path), attempt=int(environ.get("HPCACCEL_ATTEMPT", "1")), project=project)


def load(place: OutputLocation, **given: Any) -> Settings:
    """Settings of this process. Values in ``given`` that are not None override all others.

    Raises:
        RuntimeMisuse: a value is not allowed.
    """
    from hpcaccel.runtime.launch_env import settings_from_env  # imports torch

    settings = Settings(**settings_from_env()) if place.run is None else _of_run(place.run)
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    for name, allowed in _ALLOWED.items():
        if getattr(settings, name) not in allowed:
            value = getattr(settings, name)
            raise RuntimeMisuse(f"{name}={value!r} is not a valid value (allowed: {', '.join(allowed)})")
    if settings.gradient_accumulation_steps < 1:
        raise RuntimeMisuse(f"gradient_accumulation_steps={settings.gradient_accumulation_steps} must be at least 1")
    return settings


def _was_not_found(document: Mapping[str, Any], launch: LaunchSpec | None) -> bool:
    """Whether ``hpcaccel submit`` chose ``stop`` for a script in which it may have overlooked an Accelerator."""
    entrypoint = document.get("spec", {}).get("entrypoint") or {}
    return launch is not None and launch.stop_is_default and not entrypoint.get("command")


def _of_run(run: RunDir) -> Settings:
    if int(os.environ.get("HPCACCEL_PROTOCOL", PROTOCOL)) > PROTOCOL:
        raise RankEnvironmentError(
            "the run was submitted by a newer hpcaccel than the one that its ranks import from "
            f"{Path(__file__).parents[2]}: upgrade hpcaccel there"
        )
    document = read_json(run.spec) or {}
    return _from_spec(document, launch_of(document, source=run.spec) if "launch" in document else None)


def _from_spec(document: Mapping[str, Any], launch: LaunchSpec | None) -> Settings:
    spec = document.get("spec", {})
    sections = {**spec.get("checkpoint", {}), **spec.get("runtime", {})}
    values = {key: value for key, value in sections.items() if key in {item.name for item in fields(Settings)}}
    # If the spec does not set ``stop``, ``hpcaccel submit`` has chosen it: "signals" for a command, and for a script in
    # which it found no Accelerator. If the script has one after all, it stops like any script with an Accelerator.
    given = None if launch is None or _was_not_found(document, launch) else launch.stop
    values["stop"] = given or values.get("stop") or "cooperative"
    fsdp = sections.get("fsdp") or {}
    values["fsdp_wrap"] = tuple(fsdp.get("wrap") or ())
    values["reshard_after_forward"] = fsdp.get("reshard_after_forward", True)
    for name in ("shard_size", "param_dtype", "reduce_dtype", "output_dtype", "cpu_offload"):
        if fsdp.get(name) is not None:
            values[f"fsdp_{name}"] = fsdp[name]
    return Settings(**values)
