"""``estimate-memory``: the GPU memory that training a model takes, by strategy and precision."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hpcaccel.cli.options import Json
from hpcaccel.cli.output import print_json
from hpcaccel.errors import UserError

__all__ = ["estimate_memory"]

ATTENTION = ("sdpa", "eager")


Source = Annotated[
    str,
    typer.Argument(
        help="A job spec, a safetensors file or folder, a config.json, a checkpoint, or a Python function that "
        "returns the model, as module:function.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="The model of a job spec. Default: that of its newest checkpoint."),
]
Gpus = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Number of GPUs. Default: the job spec's, else those of one node."),
]
GpusPerNode = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="GPUs that share one copy of the model in 'hybrid'.")
]
ComparedCluster = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Cluster profile whose GPUs to compare with; local: this machine's."),
]
GpuMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory of a GPU, such as 80GB, instead of a cluster's.")
]
OptimizerName = Annotated[str, typer.Option(metavar="NAME", help="adamw, adamw-8bit, adafactor, sgd or sgd-momentum.")]
BatchSize = Annotated[int, typer.Option(min=1, metavar="N", help="Samples in a micro-batch of one rank.")]
SequenceLength = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Tokens in a sample. Default: the model's maximum, at most 4096."),
]
Recomputes = Annotated[
    bool, typer.Option("--activation-checkpointing", help="Activations are recomputed in the backward pass.")
]
AttentionKind = Annotated[str, typer.Option(metavar="KIND", help="sdpa, or eager, which stores the attention matrix.")]
Python = Annotated[str | None, typer.Option(metavar="PATH", help="Python interpreter with torch. Default: this one.")]


def estimate_memory(
    source: Source,
    model: Model = None,
    gpus: Gpus = None,
    gpus_per_node: GpusPerNode = None,
    cluster: ComparedCluster = None,
    gpu_memory: GpuMemory = None,
    optimizer: OptimizerName = "adamw",
    batch_size: BatchSize = 1,
    sequence_length: SequenceLength = None,
    activation_checkpointing: Recomputes = False,
    attention: AttentionKind = "sdpa",
    python: Python = None,
    json: Json = False,
) -> None:
    """Estimate the memory that training takes on each GPU, by strategy and precision, and whether it fits."""
    from hpcaccel.launch.estimate_source import Wishes, question_about
    from hpcaccel.launch.memory_estimate import OPTIMIZERS, estimates
    from hpcaccel.view.memory_table import estimate_to_json, print_estimate

    for option, value, allowed in (("--optimizer", optimizer, OPTIMIZERS), ("--attention", attention, ATTENTION)):
        if value not in allowed:
            raise UserError(f"{option} {value!r} is not valid (allowed: {', '.join(allowed)})")
    question = question_about(
        source,
        Wishes(
            model=model,
            gpus=gpus,
            gpus_per_node=gpus_per_node,
            cluster=cluster,
            gpu_memory=gpu_memory,
            optimizer=optimizer,
            batch=batch_size,
            sequence=sequence_length,
            recomputes=activation_checkpointing,
            stores_attention=attention == "eager",
            python=python or sys.executable,
        ),
    )
    found = estimates(question.model, question.setup)
    if json:
        print_json(estimate_to_json(question, found))
    else:
        print_estimate(question, found)
