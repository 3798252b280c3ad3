"""What this process was asked for: the run directory's ``spec.json``, overridden by the script's own words.

What the script says in ``Accelerator(...)`` wins, then the spec, then the defaults below.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import RunDir, read_json
from hpcaccel.errors import RuntimeMisuse

__all__ = ["OWN", "SHARED", "Place", "Settings", "load", "locate"]

_ALLOWED = {
    "strategy": ("ddp", "fsdp"),
    "mixed_precision": ("no", "fp16", "bf16", "fp8"),
    "stop": ("cooperative", "signals"),
    "when_busy": ("wait", "skip"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of the spec's ``runtime`` and ``checkpoint`` sections what a rank needs."""

    strategy: str = "ddp"
    mixed_precision: str = "no"
    gradient_accumulation_steps: int = 1
    seed: int | None = None
    deterministic: bool = False
    stop: str = "cooperative"
    fsdp_wrap: tuple[str, ...] = ()
    """Class names of the blocks that FSDP2 shards one by one; empty: repeated blocks are found."""
    reshard_after_forward: bool = True
    fsdp_shard_size: int | None = None
    """Ranks that hold one replica together; None: all of them."""
    fsdp_param_dtype: str | None = None
    fsdp_reduce_dtype: str | None = None
    fsdp_output_dtype: str | None = None
    fsdp_cpu_offload: bool = False
    activation_checkpointing: bool = False
    compile: bool = False
    tensor_parallel_size: int = 1
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
    """Of collectives that the script's own calls and the gradients need."""
    control_timeout_seconds: float = 60.0
    """Of hpcaccel's own: a rank that is later than this is not coming."""
    save_wait_seconds: float = 5.0
    """How long rank 0 waits in ``save_state`` for ranks that hold the same as it does."""
    every_steps: int | None = None
    every_minutes: float | None = None
    background: bool = True
    """Whether checkpoints that are due are written while the training goes on."""
    when_busy: str = "wait"
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
"""What each Accelerator is told for itself."""

SHARED = frozenset(field.name for field in fields(Settings)) - OWN
"""What all Accelerators of a process have in common."""


@dataclass(frozen=True)
class Place:
    """Where this process writes. Without a run directory there may still be a directory for checkpoints."""

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


def locate(project_dir: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ) -> Place:
    """The run directory that the launcher named, else the script's own ``project_dir``."""
    path = environ.get("HPCACCEL_RUN_DIR")
    project = None if project_dir is None else Path(project_dir).absolute()
    if not path:
        return Place(project=project)
    return Place(run=RunDir(path), attempt=int(environ.get("HPCACCEL_ATTEMPT", "1")), project=project)


def load(place: Place, **given: Any) -> Settings:
    """Settings of this process; those of ``given`` that are None were not given.

    Raises:
        RuntimeMisuse: a value that is not allowed.
    """
    from hpcaccel.runtime.launch_env import asked_for  # brings torch along

    settings = Settings(**asked_for()) if place.run is None else _from_spec(read_json(place.run.spec) or {})
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    for name, allowed in _ALLOWED.items():
        if getattr(settings, name) not in allowed:
            raise RuntimeMisuse(f"{name}={getattr(settings, name)!r} is not known (one of: {', '.join(allowed)})")
    if settings.gradient_accumulation_steps < 1:
        raise RuntimeMisuse(f"gradient_accumulation_steps={settings.gradient_accumulation_steps} must be at least 1")
    return settings


def _was_not_found(document: Mapping[str, Any]) -> bool:
    """Whether ``hpcaccel submit`` overlooked the Accelerator of this script."""
    entrypoint = document.get("spec", {}).get("entrypoint") or {}
    return bool(document.get("launch", {}).get("stop_is_default")) and not entrypoint.get("command")


def _from_spec(document: Mapping[str, Any]) -> Settings:
    spec = document.get("spec", {})
    sections = {**spec.get("checkpoint", {}), **spec.get("runtime", {})}
    values = {key: value for key, value in sections.items() if key in {field.name for field in fields(Settings)}}
    # The spec may leave open how ranks are stopped. Then the launcher has decided: for a command, and for a script in
    # which it found no Accelerator. Of a script that has one all the same, SIGTERM is heard as in any other.
    launch = document.get("launch", {})
    given = None if _was_not_found(document) else launch.get("stop")
    values["stop"] = given or values.get("stop") or "cooperative"
    fsdp = sections.get("fsdp") or {}
    values["fsdp_wrap"] = tuple(fsdp.get("wrap") or ())
    values["reshard_after_forward"] = fsdp.get("reshard_after_forward", True)
    for name in ("shard_size", "param_dtype", "reduce_dtype", "output_dtype", "cpu_offload"):
        if fsdp.get(name) is not None:
            values[f"fsdp_{name}"] = fsdp[name]
    return Settings(**values)
