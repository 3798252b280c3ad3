"""Division of a model into consecutive stages of about the same size, one for each rank of a pipeline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hpcaccel.core.formatting import counted
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.offload.device_map import infer_auto_device_map
from hpcaccel.runtime.offload.model_parts import warn_of_unknown
from hpcaccel.runtime.parallel.wrapping import repeated_blocks

__all__ = ["generate_device_map", "split_points_of"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward of their own: a stage cannot begin at one."""


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Collection[str] | str | None = None,
    max_memory: Mapping[int | str, Any] | None = None,
) -> OrderedDict[str, Any]:
    """The process that holds each part of a model: consecutive parts, in the order of their registration, so that the
    process with the most bytes has as few as possible. The model may be on the meta device.

    Args:
        no_split_module_classes: names of classes whose modules are on one process. Default: the model's own
            ``_no_split_modules``. Without any, a model's repeated blocks are split only if they are larger than an
            equal share.
        max_memory: bytes, or sizes such as ``"10GB"``, by device. With it, or for one process, the map is that of
            ``infer_auto_device_map``, which fills the devices in order.

    Returns:
        By module or tensor name, the index of the process.

    Raises:
        RuntimeMisuse: ``num_processes`` is not positive, or the model has fewer parts with parameters than that.
        OffloadError: ``max_memory`` has an unknown device.
    """
    if num_processes < 1:
        raise RuntimeMisuse(f"num_processes={num_processes}: pass a positive number of processes")
    listed = list(getattr(model, "_no_split_modules", None) or ())
    if no_split_module_classes is None:
        no_split_module_classes = listed
    given = no_split_module_classes
    whole = {given} if isinstance(given, str) else set(given)
    classes = {type(module).__name__ for module in model.modules()}
    # A model may lack a class that transformers lists for all models of its kind.
    unknown = sorted(whole - classes - set(listed), key=str)
    warn_of_unknown("no_split_module_classes", unknown, model, "module of class", sorted(classes))
    if num_processes == 1 or max_memory is not None:
        return infer_auto_device_map(
            model, max_memory, no_split_module_classes=no_split_module_classes, clean_result=False
        )
    blocks = set(repeated_blocks(model))
    runs = _runs(_parts("", model, whole, blocks, share=_bytes(model) / num_processes))
    if len(runs) < num_processes:
        raise _too_few(model, len(runs), num_processes)
    found: OrderedDict[str, Any] = OrderedDict()
    ends = _balanced([run.size for run in runs], num_processes)
    for stage, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        found.update((name, stage) for run in runs[start:end] for name in run.names)
    return found


def _too_few(model: nn.Module, parts: int, num_processes: int) -> RuntimeMisuse:
    smallest = len(_runs(_parts("", model, (), (), share=0)))
    by_hand = f", or pass split_points with {counted(num_processes - 1, 'module name')}"
    return RuntimeMisuse(
        f"{type(model).__name__} has {counted(parts, 'part')} with parameters that can begin a stage, too few for "
        f"{num_processes} ranks: start at most {counted(max(1, parts), 'rank')}"
        f"{by_hand if smallest >= num_processes else ''}"
    )


def split_points_of(device_map: Mapping[str, Any], num_processes: int) -> list[str]:
    """The first module of each process but the first one, in a map of ``generate_device_map``.

    Raises:
        RuntimeMisuse: a process has no module.
    """
    first: dict[Any, str] = {}
    for name, process in device_map.items():
        first.setdefault(process, name)
    if missing := [process for process in range(1, num_processes) if process not in first]:
        raise RuntimeMisuse(
            f"the device map has no module for process {missing[0]} of {num_processes}: pass split_points with "
            f"{counted(num_processes - 1, 'module name')}"
        )
    return [first[process] for process in range(1, num_processes)]


@dataclass
class _Part:
    """A module that is not divided, or a tensor that a divided module holds itself."""

    name: str
    size: float
    can_begin: bool
    """Whether a stage can begin here: at a module with parameters. A stage without parameters would be no stage, and
    modules such as rotary embeddings are often registered far from where they are called."""


@dataclass
class _Run:
    """Parts that are in one stage: one that can begin a stage, and the parts after it that cannot."""

    names: list[str] = field(default_factory=list)
    size: float = 0


def _parts(
    name: str, module: nn.Module, whole: Collection[str], blocks: Collection[nn.Module], *, share: float
) -> Iterator[_Part]:
    """The parts of a module. What is not a block is divided further, so that the stages can differ less in size."""
    size = _bytes(module)
    divisible = any(True for _ in module.children()) and not isinstance(module, nn.MultiheadAttention)
    if not divisible or type(module).__name__ in whole:
        divided = False
    else:
        divided = not name or isinstance(module, _CONTAINERS) or size > (share if module in blocks else share / 4)
    if not divided:
        can_begin = bool(name) and any(True for _ in module.parameters()) and not isinstance(module, _CONTAINERS)
        yield _Part(name, size, can_begin)
        return
    prefix = f"{name}." if name else ""
    for own in (module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
        yield from (_Part(f"{prefix}{key}", tensor.nbytes, False) for key, tensor in own)
    for key, child in module.named_children():
        yield from _parts(f"{prefix}{key}", child, whole, blocks, share=share)


def _bytes(module: nn.Module) -> float:
    tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    return sum(tensor.nbytes for tensor in tensors)


def _runs(parts: Iterator[_Part]) -> list[_Run]:
    runs: list[_Run] = []
    begun = False
    for part in parts:
        if not runs or (part.can_begin and begun):
            runs.append(_Run())
        begun = begun or part.can_begin
        runs[-1].names.append(part.name)
        runs[-1].size += part.size
    return runs if begun else []


def _balanced(sizes: Sequence[float], count: int) -> list[int]:
    """The end of each of ``count`` consecutive, non-empty groups whose largest sum is the least possible."""
    total = [0.0]
    for size in sizes:
        total.append(total[-1] + size)
    # largest[end]: the largest sum of the best division of sizes[:end] into the groups so far.
    largest = list(total)
    cuts: list[list[int]] = []
    for groups in range(2, count + 1):
        found, cut = [float("inf")] * len(total), [0] * len(total)
        for end in range(groups, len(total)):
            for start in range(groups - 1, end):
                worst = max(largest[start], total[end] - total[start])
                if worst < found[end]:
                    found[end], cut[end] = worst, start
        largest = found
        cuts.append(cut)
    ends = [len(sizes)]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return ends[::-1]
