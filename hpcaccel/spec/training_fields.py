"""How the ranks train, save and survive."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hpcaccel.spec.fields import Conflict, Count, Flag, Natural, PathText, Positive, Requeue, Section, Seed, Word, words

__all__ = ["Checkpoint", "Fsdp", "Resilience", "Runtime"]


class Fsdp(Section):
    """Settings of strategy fsdp (torch's fully_shard)."""

    wrap: list[Word] = words(
        "Class names of the modules that are sharded one by one, such as [Block]. Default: the largest repeated module."
    )
    reshard_after_forward: Flag = Field(
        default=True,
        description="Free the gathered parameters after the forward pass: less memory, more communication.",
    )
    shard_size: Count | None = Field(
        default=None,
        description="Ranks that hold one copy of the model together, such as those of a node; the copies are "
        "replicated. Default: all ranks hold one copy.",
    )
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="Precision of gathered parameters. Default: that of mixed_precision."
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="Precision in which gradients are summed over ranks. Default: fp32."
    )
    output_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="Precision that each sharded module's outputs are cast to. Default: as they come."
    )
    cpu_offload: Flag = Field(
        default=False, description="Keep shards and optimizer state in the node's memory: less GPU memory, slower."
    )


class Runtime(Section):
    """Settings of hpcaccel.Accelerator. Programs that do not use it are not touched by them, ``stop`` excepted."""

    strategy: Literal["ddp", "fsdp"] = Field(
        default="ddp",
        description="ddp: every rank has the whole model. fsdp: the model is sharded over the ranks (FSDP2).",
    )
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = Field(
        default="no",
        description="Precision of the forward pass. fp8 needs GPUs of compute capability 8.9 or newer, and torchao.",
    )
    gradient_accumulation_steps: Count = Field(default=1, description="Micro-batches for one optimizer step.")
    seed: Seed | None = Field(
        default=None, description="Seed of Python, numpy and torch on every rank. Default: none is set."
    )
    deterministic: Flag = Field(
        default=False,
        description="Fixed algorithms, slower: the same bits in every run and, where the batches come from prepared "
        "loaders, after every resume (same world size, torch and processor).",
    )
    stop: Literal["cooperative", "signals"] | None = Field(
        default=None,
        description="How the program is stopped. cooperative: it uses hpcaccel.Accelerator, which saves and leaves at "
        "a step boundary. signals: it gets SIGTERM, as from Slurm. Default: cooperative for functions, and where the "
        "script, or what it imports from its folder, uses hpcaccel.Accelerator or should_stop; else signals.",
    )
    compile: Flag = Field(default=False, description="Compile prepared models with torch.compile.")
    activation_checkpointing: Flag = Field(
        default=False,
        description="Compute the activations of repeated blocks again in the backward pass: less memory, slower.",
    )
    tensor_parallel_size: Count = Field(
        default=1,
        description="Neighbouring ranks that share each tensor, by the plan that the program gives "
        "(Accelerator(tp_plan=...)); they train on the same data.",
    )
    debug: Flag = Field(
        default=False,
        description="Compare shapes and types among the ranks before each collective with GPU tensors, too. With those "
        "of CPUs it is always done.",
    )
    timeout_seconds: Positive = Field(
        default=1800,
        description="How long ranks wait for each other's gradients and in what the program calls together. "
        "InitProcessGroupKwargs(timeout=...) overrides it.",
    )
    control_timeout_seconds: Positive = Field(
        default=60,
        description="How long ranks wait for each other in saves and loads, and when one has run out of memory.",
    )
    save_wait_seconds: Positive = Field(
        default=5,
        description="How long rank 0 waits in save_state for ranks that do not come, as when the script calls it on "
        "the main process only, before it saves without them.",
    )
    fsdp: Fsdp = Field(default_factory=Fsdp, description="Settings of strategy fsdp.")


def _resume(value: Any) -> Any:
    if value is None:
        raise ValueError("must be auto, never or the path of a checkpoint")
    return value


class Checkpoint(Section):
    """When to save, what to keep, and what to start from. A job that is asked to stop saves in any case."""

    every_steps: Count | None = Field(
        default=500, description="Save after so many optimizer steps; null: not by steps."
    )
    every_minutes: Positive | None = Field(default=None, description="Save after so many minutes; null: not by time.")
    background: Flag = Field(
        default=True,
        description="Write checkpoints that are due while the training goes on: it waits only for a copy in memory, as "
        "large as what the rank saves. Where the memory is missing, and for the last save of a job, it waits.",
    )
    when_busy: Literal["wait", "skip"] = Field(
        default="wait",
        description="When a checkpoint is due and the one before is still being written. wait: for that one. skip: "
        "leave this one out.",
    )
    keep: Count | None = Field(default=2, description="How many of the newest checkpoints to keep; null: all.")
    keep_every_steps: Count | None = Field(
        default=None,
        description="Besides these, keep the first checkpoint of every so many steps for good; null: none.",
    )
    resume: Annotated[PathText, BeforeValidator(_resume)] = Field(
        default="auto",
        description="auto: from the run's newest checkpoint, or from the start. never: always from the start. A path: "
        "the first attempt starts from that checkpoint, later ones from the run's own.",
        examples=["auto", "never", "runs/gpt/20261120-153012-4f2a/checkpoints/step_00001200"],
    )


class Resilience(Section):
    """What happens when the cluster takes the nodes back, and when something breaks."""

    requeue: Requeue = Field(
        default=True,
        description="Come back through the queue after a preemption or at the time limit. expedite: at once, and "
        "after the loss of a node before all other jobs: Slurm's --requeue=expedite (25.11 and later, with "
        "enable_expedited_requeue in SlurmctldParameters). The batch job then always ends with exit code 0.",
    )
    warning_seconds: Count = Field(
        default=120,
        description="How long before the time limit the ranks are asked to save and leave; more where the slowest "
        "save and two steps, as measured, need it. Slurm may ask up to 60 s earlier. Of a short limit at most half.",
    )
    max_failures: Natural = Field(
        default=3,
        description="Failures after which the run ends. Two failures without a new checkpoint between them end it too.",
    )
    max_preemptions: Natural | None = Field(
        default=None, description="Preemptions after which the run ends; null: no limit."
    )
    restart_in_place: Natural = Field(
        default=2, description="How often the ranks are started again inside the same allocation after a failure."
    )
    preflight: Literal["off", "quick", "full"] = Field(
        default="quick",
        description="Checks on each node before the ranks start; a node that fails is left out. quick: GPUs, disk, "
        "names. full: a small all-reduce between all ranks as well.",
    )
    exclude_hours: Positive = Field(
        default=24, description="For how long a node is left out after a failure that is its own."
    )
    max_excluded: Natural = Field(default=4, description="How many nodes are left out at a time at most; 0: never any.")
    stop_timeout_seconds: Count = Field(
        default=300,
        description="How long ranks that were asked to stop may take to save and leave before they are killed; longer "
        "where their saves are known to take longer.",
    )
    hang_timeout_seconds: Natural | None = Field(
        default=None,
        description="When no rank has done a step, read a batch or met the others for so long, the ranks hang: their "
        "stacks are written down, they are killed and start again. Three times as long for the first step, loads and "
        "saves, and for a lone rank. Default: twenty times a usual step, at least 600; 0: they may hang for ever.",
    )
    chain: Count | None = Field(
        default=None,
        description="Go on in follow-up jobs instead of requeueing, where a site forbids that or preempts by "
        "cancelling (PreemptMode=CANCEL): at most so many jobs one after another, until somebody resumes the run.",
        examples=[10],
    )
    chain_ahead: Count = Field(
        default=2,
        description="How many follow-up jobs wait in the queue. Each job hands in another one when it starts; where "
        "sbatch is forbidden on compute nodes, set it to chain - 1, and submit hands all in.",
    )

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        if values.get("chain") is not None and values.get("requeue") is False:
            found.append(Conflict("chain", "is a way to come back, which requeue: false forbids: set one of them"))
        if values.get("chain") is not None and values.get("requeue") == "expedite":
            found.append(Conflict("chain", "goes on in other jobs, requeue: expedite in this one: set one"))
        return found
