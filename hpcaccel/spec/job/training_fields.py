"""Sections ``runtime``, ``checkpoint`` and ``resilience`` of a job spec."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hpcaccel.spec.job.fields import (
    Conflict,
    Count,
    Flag,
    Natural,
    PathText,
    Positive,
    Requeue,
    Section,
    Seed,
    Word,
    section_field,
    text_list,
)
from hpcaccel.spec.job.watch_fields import PresetName, WatchSection, watch_setting

__all__ = ["CheckpointSection", "DeepSpeedSection", "FsdpSection", "ResilienceSection", "RuntimeSection"]


class FsdpSection(Section):
    """Settings of strategy fsdp (torch's fully_shard)."""

    wrap: list[Word] = text_list(
        "Class names of the modules to shard separately, such as [Block]. Default: the largest repeated module."
    )
    reshard_after_forward: Flag = Field(
        default=True,
        description="Free the gathered parameters after the forward pass: less memory, more communication.",
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


class ResilienceSection(Section):
    """What happens after preemptions, at the time limit and after failures."""

    requeue: Requeue = Field(
        default=True,
        description="Requeue the job after a preemption or at the time limit. expedite: without delay, and after the "
        "loss of a node ahead of all other jobs, through Slurm's --requeue=expedite (25.11 and later, with "
        "enable_expedited_requeue in SlurmctldParameters). The batch job then always ends with exit code 0.",
    )
    warning_seconds: Count = Field(
        default=120,
        description="How many seconds before the time limit the ranks are requested to save and exit; more if the "
        "slowest save and two steps, as measured, take longer. Slurm can send its signal up to 60 s earlier. At most "
        "half of the time limit.",
    )
    max_failures: Natural = Field(
        default=3,
        description="Failures after which the run ends. Two failures without a new checkpoint between them also end "
        "it.",
    )
    max_preemptions: Natural | None = Field(
        default=None, description="Preemptions that a run survives: the next one ends it. null: no limit."
    )
    restart_in_place: Natural = Field(
        default=2, description="How often the ranks are restarted in the same allocation after a failure."
    )
    on_node_loss: Literal["requeue", "shrink"] = Field(
        default="requeue",
        description="What happens when a node of a running job fails and no spare node is left. shrink: the ranks are "
        "restarted in the same job on fewer nodes, if slurm.nodes is a range or a list that allows this; until then "
        "they use as many of the job's nodes as it allows. A requeue, as by `hpcaccel stop --requeue`, brings the full "
        "number back. The job is submitted with sbatch's --no-kill.",
    )
    spare_nodes: Natural = Field(
        default=0,
        description="Number of nodes that the job gets in addition to slurm.nodes. They are idle until a node fails: "
        "then the ranks are restarted in the same job, with a spare node in place of the failed one, and the job does "
        "not go back to the queue. It is submitted with sbatch's --no-kill. Counts as a restart in place.",
        examples=[1],
    )
    warm_restart: Literal["auto", "off"] = Field(
        default="off",
        description="auto: each rank has a parent process that outlives it, imports torch while the first attempt "
        "trains, and starts the next attempt in the same place by fork, without srun and without the import of torch. "
        "Commands, torchrun, containers, components, bridges and trials of sweeps have no such parents: their restarts "
        "begin with new processes.",
    )
    preflight: Literal["off", "quick", "full"] = Field(
        default="quick",
        description="Checks on each node before the ranks start; a node that fails is excluded. quick: GPUs, disk, "
        "name resolution. full: also a small all-reduce between all ranks.",
    )
    exclude_hours: Positive = Field(
        default=24, description="How many hours a node is excluded after a failure that it caused."
    )
    max_excluded: Natural = Field(default=4, description="Maximum number of nodes excluded at a time; 0: none.")
    stop_timeout_seconds: Count = Field(
        default=300,
        description="How long ranks may take to save and exit after a stop request before they are killed; longer if "
        "their saves are known to take longer.",
    )
    hang_timeout_seconds: Natural | None = Field(
        default=None,
        description="If no rank completes a step, reads a batch or completes a collective call for this long, the "
        "ranks are considered hung: their stacks are recorded, and they are killed and restarted. The limit is three "
        "times as long for the first step, for loads and saves, and for a single rank. Default: twenty times the "
        "typical step time, at least 600; 0: hangs are not detected.",
    )
    chain: Count | None = Field(
        default=None,
        description="Continue in follow-up jobs instead of requeueing, for sites that forbid requeueing or cancel "
        "preempted jobs (PreemptMode=CANCEL). The value is the maximum number of jobs in a row. After the last one, "
        "the run continues only when it is resumed.",
        examples=[10],
    )
    chain_ahead: Count = Field(
        default=2,
        description="How many follow-up jobs wait in the queue. Each job submits another one when it starts. If sbatch "
        "is forbidden on compute nodes, set this to chain - 1: submit then submits all of them.",
    )

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        if values.get("chain") is not None and values.get("requeue") is False:
            found.append(Conflict("chain", "conflicts with requeue: false: set only one of them"))
        if values.get("chain") is not None and values.get("requeue") == "expedite":
            found.append(Conflict("chain", "conflicts with requeue: expedite: set only one of them"))
        for key in ("spare_nodes", "on_node_loss"):
            alone = values.get("requeue") is False or values.get("chain") is not None
            if alone and values.get(key) not in (None, 0, "requeue"):
                advice = (
                    "needs resilience.requeue, and no chain: if the job's first node fails, it has to be requeued. "
                    f"Remove {key}"
                )
                found.append(Conflict(key, advice))
        return found
