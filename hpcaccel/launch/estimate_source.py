"""The input of ``hpcaccel estimate-memory``: model, ranks and GPUs, from a source and options."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from hpcaccel.checkpoint_files.weight_files import SIZE_ADVICE, parse_size
from hpcaccel.errors import CheckpointError, RunNotFound, UserError
from hpcaccel.launch.gpu_memory import GpuKind, kind_named, kinds_of_cluster
from hpcaccel.launch.memory_estimate import TrainingSetup
from hpcaccel.launch.model_size import ModelSize, model_of
from hpcaccel.slurm.site_parsing import gres
from hpcaccel.spec import ClusterProfile, JobSpec, load_profile, load_spec
from hpcaccel.spec.cluster.cluster_facts import load_facts

__all__ = ["Question", "Wishes", "question_about"]

_SPECS = (".yaml", ".yml")
_LEAST = 2**20
"""Bytes below which ``--gpu-memory`` is a number whose unit is missing."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The options of the command. If a value is None, it is taken from the source, or the default is used."""

    model: str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    cluster: str | None = None
    gpu_memory: str | None = None
    optimizer: str = "adamw"
    batch: int = 1
    sequence: int | None = None
    recomputes: bool = False
    stores_attention: bool = False
    python: str = sys.executable


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, how it is trained, and the GPUs to compare with."""

    model: ModelSize
    setup: TrainingSetup
    gpus: tuple[GpuKind, ...] = ()
    own: tuple[str, str] | None = None
    """Strategy and precision of the job spec."""
    notes: tuple[str, ...] = field(default=())


def question_about(source: str, wishes: Wishes) -> Question:
    """Build the ``Question`` for a model, or for the model that a job spec trains.

    Raises:
        UserError: the source is not a model, or is a job spec whose model is not known.
        SpecError: the job spec or the cluster profile is invalid, or the cluster has not been probed.
    """
    if Path(source).suffix in _SPECS:
        return _about_spec(Path(source), wishes)
    if wishes.model is not None:
        raise UserError(f"--model is for a job spec, and {source!r} is a model itself")
    kinds, notes = _kinds(wishes, load_profile(wishes.cluster), None, None)
    per_node = wishes.gpus_per_node or max((one.per_node or 0 for one in kinds), default=0)
    gpus = wishes.gpus or per_node or 1
    setup = _setup(wishes, gpus, per_node or min(gpus, 8))
    return Question(model=model_of(source, python=wishes.python), setup=setup, gpus=tuple(kinds), notes=tuple(notes))


def _setup(
    wishes: Wishes, gpus: int, per_node: int, *, recomputes: bool = False, offload: bool = False
) -> TrainingSetup:
    return TrainingSetup(
        gpus=gpus,
        gpus_per_node=min(per_node, gpus),
        optimizer=wishes.optimizer,
        batch=wishes.batch,
        sequence=wishes.sequence,
        recomputes=wishes.recomputes or recomputes,
        stores_attention=wishes.stores_attention,
        cpu_offload=offload,
    )


def _about_spec(path: Path, wishes: Wishes) -> Question:
    profile = load_profile(wishes.cluster)
    spec = load_spec(path, profile=profile)
    kinds, notes = _kinds(wishes, profile, spec.slurm.partition, _gpu_type(spec))
    per_node = wishes.gpus_per_node or spec.slurm.ranks_per_node
    gpus = wishes.gpus or per_node * spec.slurm.min_nodes
    runtime = spec.runtime
    if runtime.tensor_parallel_size > 1:
        notes.append("tensor_parallel_size is not part of the estimate: each rank then holds less than shown")
    if runtime.context_parallel_size > 1:
        notes.append("context_parallel_size is not part of the estimate: activations are then smaller than shown")
    fsdp = runtime.fsdp
    own = {"no": "fp32", "bf16": "mixed", "fp16": "mixed"}.get(runtime.mixed_precision)
    if own is None:
        notes.append("mixed_precision: fp8 is estimated as mixed precision")
    sharded = "hybrid" if fsdp.shard_size and fsdp.shard_size < gpus else "fsdp"
    setup = _setup(
        wishes,
        gpus,
        fsdp.shard_size if runtime.strategy == "fsdp" and fsdp.shard_size else per_node,
        recomputes=runtime.activation_checkpointing,
        offload=runtime.strategy == "fsdp" and fsdp.cpu_offload,
    )
    return Question(
        model=_model_of_spec(spec, path, wishes),
        setup=setup,
        gpus=tuple(kinds),
        own=(sharded if runtime.strategy == "fsdp" else "ddp", own or "mixed"),
        notes=tuple(notes),
    )


def _model_of_spec(spec: JobSpec, path: Path, wishes: Wishes) -> ModelSize:
    """The model of ``--model``, of the checkpoint that the job resumes from, or of the newest one of its runs."""
    from hpcaccel.submission.runs.checkpoints import find_checkpoint

    if wishes.model is not None:
        return model_of(wishes.model, python=wishes.python)
    resume = spec.checkpoint.resume
    if resume not in ("auto", "never"):
        return model_of(str(find_checkpoint(resume)), python=wishes.python)
    try:
        newest = find_checkpoint(spec.name)
    except (RunNotFound, CheckpointError):
        raise UserError(
            f"{path} does not name the model that it trains, and no run named {spec.name!r} has a checkpoint yet: "
            "give the model with --model (a safetensors file or folder, a config.json, or a function as "
            "module:function)"
        ) from None
    return model_of(str(newest), python=wishes.python)


def _gpu_type(spec: JobSpec) -> str | None:
    """The type of GPU that a spec requests, such as ``a100``; None if any will do."""
    for value in (spec.slurm.gpus_per_node, spec.slurm.gpus_per_task):
        words = [] if value is None else [word for word in str(value).split(":") if not word.isdecimal()]
        if words and words[-1] != "gpu":
            return words[-1]
    return next((kind for kind in gres(str(spec.slurm.gres or ""))[0] if kind != "gpu"), None)


def _kinds(
    wishes: Wishes, profile: ClusterProfile | None, partition: str | None, gpu_type: str | None
) -> tuple[list[GpuKind], list[str]]:
    """The GPUs to compare with, and notes about them."""
    if wishes.gpu_memory is not None:
        size = parse_size(wishes.gpu_memory)
        if not size:
            raise UserError(f"--gpu-memory {wishes.gpu_memory!r} is not a size: {SIZE_ADVICE}")
        if size < _LEAST:
            raise UserError(f"--gpu-memory {wishes.gpu_memory} is {size} bytes: {_with_unit(wishes.gpu_memory)}")
        return [GpuKind(gpu_type or "GPU", size, wishes.gpus_per_node, wishes.gpu_memory)], []
    known = profile is not None and (wishes.cluster is not None or load_facts(profile.name) is not None)
    if profile is not None and known:
        kinds, notes = kinds_of_cluster(profile.name, partition)
        fitting = [one for one in kinds if gpu_type is None or one.name == gpu_type]
        return fitting or kinds, notes
    if gpu_type is not None:
        kind, note = kind_named(gpu_type)
        return [] if kind is None else [kind], [note] if note else []
    return [], ["no GPUs to compare with: give a cluster profile with --cluster, or --gpu-memory 80GB"]


def _with_unit(text: str) -> str:
    """Advice about a size that is too small for a GPU."""
    number = text.strip()
    if not number.isdecimal():
        return "give the memory of a GPU, such as 80GB"
    return f"write {number}{'GB' if int(number) < 1000 else 'MiB'}"  # nvidia-smi has MiB
