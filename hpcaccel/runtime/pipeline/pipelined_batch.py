"""Running a batch through the stages of a pipeline: chunks, padding, and the output for all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.collectives import gathering
from hpcaccel.runtime.distributed.collectives.nested_ops import (
    TensorInformation,
    ignorant_find_batch_size,
    is_tensor_information,
)
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.pipeline.traced_model import CallForm, OutputForm

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.process_group import RankGroup

__all__ = ["PipelineSchedule", "find_pippy_batch_size", "group_of_stages", "pippy_forward"]


class PipelineSchedule:
    """This rank's stage of a pipeline, with the schedule that runs it on ``num_chunks`` chunks of rows.

    Args:
        run: takes the tensors of all chunks on rank 0, nothing on the other ranks, and returns the output's tensors on
            the last rank.
        form, output: how the model is called, and what it returns.
    """

    def __init__(
        self,
        run: Callable[..., Sequence[torch.Tensor] | None],
        form: CallForm,
        output: OutputForm,
        *,
        num_chunks: int,
    ) -> None:
        self._run = run
        self.form = form
        self.output = output
        self.num_chunks = num_chunks

    @property
    def round_rows(self) -> int:
        """Number of rows that ``step`` takes."""
        return self.num_chunks * self.form.chunk_rows

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute ``round_rows`` rows. All ranks call it, rank 0 with the inputs.

        Returns:
            The model's output on the last rank, else None.
        """
        found = self._run(*(self.form.tensors(args, kwargs) if args or kwargs else ()))
        return None if found is None else self.output.filled(found)


def find_pippy_batch_size(args: Iterable[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """Number of rows of the first argument that has a tensor; None if none has."""
    sizes = (ignorant_find_batch_size(value) for value in [*(args or ()), *(kwargs or {}).values()])
    return next((size for size in sizes if size is not None), None)


def pippy_forward(
    forward: Callable[..., Any], num_chunks: int, gather_output: bool | None, *args: Any, **kwargs: Any
) -> Any:
    """Run a pipeline on a batch of any number of rows. All ranks call it; only rank 0's inputs are used.

    Args:
        forward: ``step`` of the object that ``build_pipeline`` returns, or of one of torch's schedules.
        num_chunks: number of chunks of ``forward``. The batch is padded to a multiple of it, with its last row.
        gather_output: whether all ranks return the output.

    Returns:
        The output of the batch's rows, on the last rank or on all ranks; else None.

    Raises:
        RuntimeMisuse: on all ranks: rank 0's inputs have no tensor, or differ from the example in more than the rows.
    """
    group = group_of_stages()
    if group.world_size == 1:
        return forward(*args, **kwargs)
    schedule = getattr(forward, "__self__", None)
    ours = schedule if isinstance(schedule, PipelineSchedule) else None
    rows = _agreed_rows(ours, args, kwargs, group)
    round_rows = ours.round_rows if ours else num_chunks * -(-rows // num_chunks)
    parts = []
    for start in range(0, rows, round_rows):
        if group.rank == 0:
            cut = functools.partial(_cut, start=start, rows=round_rows)
            some_args, some_kwargs = tree_map(cut, (args, kwargs))
            forward(*some_args, **some_kwargs)
        else:
            parts.append(forward())
    is_last = group.rank == group.world_size - 1
    output = _joined(parts, rows) if is_last else None
    return _from_last(output, ours.output.spec if ours else None, group) if gather_output else output


def _agreed_rows(
    schedule: PipelineSchedule | None, args: Sequence[Any], kwargs: Mapping[str, Any], group: RankGroup
) -> int:
    """Rank 0's number of rows, on every rank; its error, too, since the others would wait for its tensors."""
    rows, problem = None, "the pipeline was called without a tensor on rank 0: pass it the batch"
    if group.rank == 0:
        try:
            rows = schedule.form.rows(args, kwargs) if schedule else find_pippy_batch_size(args, kwargs)
        except RuntimeMisuse as error:
            problem = str(error)
    rows, problem = group.from_main((rows, problem), what="the pipeline's forward")
    if not rows:
        raise RuntimeMisuse(problem)
    return int(rows)


def _cut(value: Any, *, start: int, rows: int) -> Any:
    """``rows`` rows of a tensor, from ``start`` on. Its last row is repeated, which any model can compute; zeros can
    mean that a row has no token at all."""
    if not isinstance(value, torch.Tensor):
        return value
    part = value[start : start + rows]
    missing = rows - len(part)
    return torch.cat([part, part[-1:].expand(missing, *part.shape[1:])]) if missing else part


def _joined(parts: Sequence[Any], rows: int) -> Any:
    """The outputs of all rounds, without the rows that padded the last one."""
    flat = [tree_flatten(part) for part in parts]
    leaves = [
        torch.cat(same)[:rows] if isinstance(same[0], torch.Tensor) and same[0].ndim else same[0]
        for same in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return tree_unflatten(leaves, flat[0][1])


def _from_last(output: Any, spec: TreeSpec | None, group: RankGroup) -> Any:
    """The last rank's output, on every rank. Containers that are known (``spec``) are not sent: they may be classes
    that cannot be pickled."""
    assert group.exchange is not None
    last = group.world_size - 1
    leaves, found = tree_flatten(output)
    marked = [TensorInformation(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    message = marked if spec is not None else tree_unflatten(marked, found)
    message = group.exchange.object_from(last, message, what="gather_output of the pipeline")
    marked, found = tree_flatten(message, is_leaf=is_tensor_information)
    if group.rank != last:
        leaves = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device=group.device) if is_tensor_information(leaf) else leaf
            for leaf in marked
        ]
    gathering.broadcast([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], group, from_process=last)
    return tree_unflatten(leaves, found if spec is None else spec)


def group_of_stages() -> RankGroup:
    """The ranks, each of which has one stage."""
    group = World.current().group
    group.refuse_if_left()
    return group
