"""Sections ``runtime`` and ``checkpoint`` of a job spec."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hpcaccel.spec.job.fields import (
    Count,
    Flag,
    Natural,
    PathText,
    Positive,
    Section,
    Seed,
    Word,
    section_field,
    text_list,
)
from hpcaccel.spec.job.watch_fields import PresetName, WatchSection, watch_setting

__all__ = ["CheckpointSection", "DeepSpeedSection", "FsdpSection", "RuntimeSection"]


class FsdpSection(Section):
    """Settings of strategy fsdp (torch's fully_shard)."""

    wrap: list[Word] = text_list(
        "Class names of the modules to shard separately, such as [Block]. Default: the largest repeated module."
    )
    reshard_after_forward: Flag = Field(
        default=True,
        description="Free a block's gathered parameters after its forward pass: less memory, more communication.",
    )
    shard_size: Count | None = Field(
        default=None,
        description="Number of ranks that share one copy of the model, such as the ranks of a node; the copies are "
        "replicated. Default: all ranks share one copy.",
    )
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="Precision of gathered parameters. Default: the precision of mixed_precision."
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="Precision in which gradients are summed over ranks. Default: fp32."
    )
    output_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="Precision that each sharded module's outputs are cast to. Default: no cast."
    )
    cpu_offload: Flag = Field(
        default=False, description="Keep shards and optimizer state in CPU memory: less GPU memory, slower."
    )


def _zero_stage(value: int) -> int:
    if value > 3:
        raise ValueError("must be 0, 1, 2 or 3")
    return value


class DeepSpeedSection(Section):
    """Settings of strategy deepspeed. DeepSpeed must be installed in the Python environment of the ranks."""

    config_file: PathText | None = Field(
        default=None,
        description="DeepSpeed's JSON file, relative to the program's working directory. Its values override the other "
        'settings of this section, which replace its values "auto".',
    )
    zero_stage: Annotated[Natural, AfterValidator(_zero_stage)] | None = Field(
        default=None,
        description="What is sharded over the ranks. 1: optimizer states; 2: also gradients; 3: also parameters; 0: "
        "nothing. Default: 2, or as in config_file.",
    )
    gradient_clipping: Positive | None = Field(
        default=None, description="Largest norm of the gradients. Default: 1, or as in config_file."
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] | None = Field(
        default=None, description="Where optimizer states are stored, if not on the GPU."
    )
    offload_params: Literal["none", "cpu", "nvme"] | None = Field(
        default=None, description="Where parameters are stored, if not on the GPU (stage 3)."
    )


class RuntimeSection(Section):
    """Settings of hpcaccel.Accelerator. Except for ``stop``, they have no effect on programs that do not use it."""

    strategy: Literal["ddp", "fsdp", "deepspeed"] = Field(
        default="ddp",
        description="ddp: every rank has the whole model. fsdp: the model is sharded over the ranks (FSDP2). "
        "deepspeed: DeepSpeed's engine shards and steps.",
    )
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = Field(
        default="no",
        description="Precision of the forward pass. fp8 needs GPUs with compute capability 8.9 or higher, and torchao.",
    )
    gradient_accumulation_steps: Count = Field(default=1, description="Micro-batches per optimizer step.")
    seed: Seed | None = Field(
        default=None, description="Seed of Python, numpy and torch on every rank. Default: no seed is set."
    )
    deterministic: Flag = Field(
        default=False,
        description="Use deterministic algorithms, which are slower: bit-identical results in every run and, if the "
        "batches come from prepared loaders, after every resume (with the same world size, torch version and "
        "processor).",
    )
    stop: Literal["cooperative", "signals"] | None = Field(
        default=None,
        description="How the program is stopped. cooperative: it uses hpcaccel.Accelerator, stop_gate, ResultsFile or "
        "a bridge such as HpcaccelCallback, and exits between two steps. signals: it receives SIGTERM, as from Slurm. "
        "Default: cooperative for functions, and if the script, or a module that it imports from its directory, uses "
        "one of these or should_stop; otherwise signals.",
    )
    bridge: Literal["transformers"] | None = Field(
        default=None,
        description="Add hpcaccel's callback to every Trainer of this library that the program creates, as "
        "HpcaccelCallback does in a script: agreed stops, saves in time, figures in `status`. Needs hpcaccel in the "
        "Python environment of the ranks.",
    )
    compile: Flag = Field(default=False, description="Compile prepared models with torch.compile.")
    activation_checkpointing: Flag = Field(
        default=False,
        description="Recompute the activations of repeated blocks in the backward pass: less memory, slower.",
    )
    tensor_parallel_size: Count = Field(
        default=1,
        description="Number of neighbouring ranks that share each tensor, according to the program's plan "
        "(Accelerator(tp_plan=...)); they train on the same data.",
    )
    context_parallel_size: Count = Field(
        default=1,
        description="Number of neighbouring ranks that split the sequences of each batch "
        "(accelerator.maybe_context_parallel in the program). With strategy fsdp they share the parameters, too.",
    )
    debug: Flag = Field(
        default=False,
        description="Compare shapes and dtypes between ranks before each collective with GPU tensors too. With CPU "
        "tensors this check is always on.",
    )
    timeout_seconds: Positive = Field(
        default=1800,
        description="How long ranks wait for each other in gradient reductions and in the program's collective calls. "
        "InitProcessGroupKwargs(timeout=...) overrides it.",
    )
    control_timeout_seconds: Positive = Field(
        default=60,
        description="How long ranks wait for each other in saves and loads, and after one has run out of memory.",
    )
    save_wait_seconds: Positive = Field(
        default=5,
        description="How long rank 0 waits in save_state for missing ranks before it saves without them, for example "
        "if the script calls save_state on the main process only.",
    )
    fsdp: FsdpSection = section_field("Settings of strategy fsdp.")
    deepspeed: DeepSpeedSection = section_field("Settings of strategy deepspeed.")


def _resume(value: Any) -> Any:
    if value is None:
        raise ValueError("must be auto, never or the path of a checkpoint")
    return value


def _replicas(value: int) -> int:
    if value > 1:
        raise ValueError("must be 0 or 1")
    return value


class CheckpointSection(Section):
    """When to save, what to keep, and what to start from. Ranks that stop to continue later save, too."""

    every_steps: Count | None = Field(
        default=500, description="Number of optimizer steps between saves; null: no saves by step count."
    )
    every_minutes: Positive | None = Field(default=None, description="Minutes between saves; null: no saves by time.")
    background: Flag = Field(
        default=True,
        description="Write scheduled checkpoints in the background: training pauses only for a copy in memory, as "
        "large as what the rank saves. If there is not enough memory, and for the last save of a job, training waits "
        "for the write.",
    )
    when_busy: Literal["wait", "skip"] = Field(
        default="wait",
        description="What to do when a checkpoint is due while the previous one is still being written. wait: wait for "
        "the previous one. skip: do not write the new one.",
    )
    snapshot_every_steps: Count | Literal["auto"] | None = Field(
        default=None,
        description="Number of optimizer steps between snapshots in the memory of the nodes (/dev/shm, two per rank, "
        "each as large as what the rank saves). If ranks crash and are restarted on the same nodes, they resume from "
        "the newest one, and read no tensor from the disk. auto: as often as costs less than 1 % of the time; null: no "
        "snapshots. A node without enough memory goes on without them. Request the memory with slurm.mem.",
    )
    snapshot_replicas: Annotated[Natural, AfterValidator(_replicas)] = Field(
        default=0,
        description="1: the memory of the next node holds a copy of each node's snapshots, so that after the loss of a "
        "node, ranks that are started on the other nodes and a new one need not go back to a checkpoint. Takes the "
        "memory of snapshots twice.",
    )
    keep: Count | None = Field(default=2, description="How many of the newest checkpoints to keep; null: all.")
    keep_every_steps: Count | None = Field(
        default=None,
        description="Also keep, permanently, the first checkpoint at or after each multiple of this number of steps; "
        "null: none.",
    )
    resume: Annotated[PathText, BeforeValidator(_resume)] = Field(
        default="auto",
        description="auto: start from the run's newest checkpoint, or from step 0 if there is none. never: always "
        "start from step 0. A path: the first attempt starts from that checkpoint, later attempts from the run's own.",
        examples=["auto", "never", "runs/gpt/20261120-153012-4f2a/checkpoints/step_00001200"],
    )
    watch: Annotated[
        WatchSection | None,
        BeforeValidator(watch_setting, json_schema_input_type=PresetName | WatchSection | None),
    ] = Field(
        default=None,
        description="Checkpoints that the program writes itself: the name of a trainer, or a section. Complete ones "
        "count as progress for the caps, and as the newest checkpoint in `status` and for entrypoint.resume_args.",
        examples=["transformers", {"glob": "out/checkpoint-*", "complete": "trainer_state.json"}],
    )
