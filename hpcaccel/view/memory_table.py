"""The table of ``hpcaccel estimate-memory``, and its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from hpcaccel.core.formatting import clean
from hpcaccel.launch.estimate_source import Question
from hpcaccel.launch.gpu_memory import GIB
from hpcaccel.launch.memory_estimate import RESERVE_BYTES, Estimate, gpus_needed, sequence_length
from hpcaccel.view.text_tables import Cell, Column, Styled, console_for, print_facts, print_table

__all__ = ["estimate_to_json", "print_estimate"]

SOURCES = (
    "activations by Korthikanti et al. 2022 (arXiv:2205.05198), a formula for transformers; their part is rough",
    "zero1-3 by Rajbhandari et al. 2020 (arXiv:1910.02054), with DeepSpeed's default buffers",
)


def print_estimate(question: Question, found: Sequence[Estimate], *, stream: TextIO | None = None) -> None:
    """Print a row for each strategy and precision, with a verdict for each kind of GPU."""
    console = console_for(stream)
    print_facts([(label, clean(text)) for label, text in _facts(question)], console=console)
    console.print()
    own = "" if question.own is None else "* "
    columns = [
        Column(title=f"{'  ' if own else ''}STRATEGY"),
        Column(title="PRECISION"),
        Column(title="PARAMETERS", right=True, leaves=2, short_title="PARAMS"),
        Column(title="GRADIENTS", right=True, leaves=2, short_title="GRADS"),
        Column(title="OPTIMIZER", right=True, leaves=2),
        Column(title="ACTIVATIONS", right=True, leaves=1),
        Column(title="WORKING", right=True, leaves=0),
        Column(title="TOTAL", right=True),
        *(Column(title=clean(kind.label)) for kind in question.gpus),
    ]
    print_table(columns, (_row(question, one) for one in found), console=console)
    console.print()
    for line in _notes(question, found):
        console.print(clean(line), markup=False, soft_wrap=True)


def _row(question: Question, one: Estimate) -> list[Cell | tuple[Cell, Cell]]:
    mark = "" if question.own is None else "* " if _is_own(question, one) else "  "
    sizes = [one.parameters, one.gradients, one.optimizer, one.activations, one.working]
    verdicts = [
        Styled("fits", "green") if one.fits(kind.memory_bytes) else Styled("does not fit", "red")
        for kind in question.gpus
    ]
    total = f"{_gib(one.total)}{'' if one.activations is not None else ' +'}"
    return [mark + one.strategy, one.precision, *map(_gib, sizes), total, *verdicts]


def _is_own(question: Question, one: Estimate) -> bool:
    return question.own == (one.strategy, one.precision)


def _gib(count: int | None) -> str:
    """A size such as ``12.6 GiB``, ``3.4 MiB``; ``?`` if it is unknown."""
    if count is None:
        return "?"
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _facts(question: Question) -> Iterator[tuple[str, str]]:
    model, setup = question.model, question.setup
    trained = "" if model.trained == model.parameters else f", of which {model.trained:,} are trained"
    yield "model", model.source
    yield "parameters", f"{model.parameters:,}{trained}"
    nodes = f" in groups of {setup.gpus_per_node} (a node)" if setup.gpus > setup.gpus_per_node > 1 else ""
    yield "GPUs", f"{setup.gpus}{nodes}"
    yield "optimizer", setup.optimizer
    if model.architecture is not None:
        tokens = sequence_length(model.architecture, setup)
        recomputed = ", recomputed" if setup.recomputes else ""
        yield "micro-batch", f"{setup.batch} x {'?' if tokens is None else f'{tokens:,} tokens'}{recomputed}"


def _notes(question: Question, found: Sequence[Estimate]) -> Iterator[str]:
    model, setup = question.model, question.setup
    yield f"per GPU; the total is the most at a time, with {_gib(RESERVE_BYTES)} for the device's context"
    if found[0].activations is None:
        why = model.why_unknown or "the maximum number of tokens is not known: give --sequence-length"
        yield f"activations are not known ({why}): each total is without them"
    else:
        yield SOURCES[0]
    yield SOURCES[1]
    if setup.cpu_offload:
        host = max(one.on_host for one in found)
        yield f"with cpu_offload, fsdp keeps up to {_gib(host)} in CPU memory for each rank"
    yield from (*model.notes, *question.notes)
    for kind in question.gpus:
        fitting = [one for one in found if one.fits(kind.memory_bytes)]
        own = next((one for one in found if _is_own(question, one)), None)
        if own is not None:
            verdict = "fits" if own.fits(kind.memory_bytes) else "does not fit"
            yield f"* the job spec's {own.strategy} with {own.precision} precision {verdict} on {kind.label}"
        if not fitting:
            needed = gpus_needed(model, setup, "mixed", kind.memory_bytes)
            advice = f"fsdp with mixed precision fits on {needed} GPUs" if needed else "not even with more GPUs"
            yield f"nothing fits on {setup.gpus} x {kind.label}; {advice}"


def estimate_to_json(question: Question, found: Sequence[Estimate]) -> dict[str, Any]:
    """The estimate for programs: sizes in bytes, per GPU."""
    model, setup = question.model, question.setup
    architecture = model.architecture
    tokens = None if architecture is None else sequence_length(architecture, setup)
    return {
        "source": model.source,
        "parameters": model.parameters,
        "trained_parameters": model.trained,
        "gpus": setup.gpus,
        "gpus_per_node": setup.gpus_per_node,
        "optimizer": setup.optimizer,
        "batch_size": setup.batch,
        "sequence_length": tokens,
        "activation_checkpointing": setup.recomputes,
        "activations_unknown_because": None if found[0].activations is not None else model.why_unknown or "no length",
        "reserve_bytes": RESERVE_BYTES,
        "gpu_kinds": [{"name": one.name, "memory_bytes": one.memory_bytes} for one in question.gpus],
        "spec": None if question.own is None else {"strategy": question.own[0], "precision": question.own[1]},
        "rows": [_row_to_json(question, one) for one in found],
        "notes": [*SOURCES, *model.notes, *question.notes],
    }


def _row_to_json(question: Question, one: Estimate) -> dict[str, Any]:
    return {
        "strategy": one.strategy,
        "precision": one.precision,
        "parameters_bytes": one.parameters,
        "gradients_bytes": one.gradients,
        "optimizer_bytes": one.optimizer,
        "activations_bytes": one.activations,
        "working_bytes": one.working,
        "step_bytes": one.step,
        "host_bytes": one.on_host,
        "total_bytes": one.total,
        "fits": {kind.label: one.fits(kind.memory_bytes) for kind in question.gpus},
    }
