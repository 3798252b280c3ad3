"""Pipeline-parallel inference: each rank computes one stage of a model, and batches pass through the ranks in chunks.

Stages are traced and run by ``torch.distributed.pipelining``. The names are Accelerate's.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hpcaccel.core.formatting import counted
from hpcaccel.errors import HpcaccelError, RuntimeMisuse
from hpcaccel.runtime.compat.availability import is_torch_version
from hpcaccel.runtime.distributed.collectives.nested_ops import send_to_device
from hpcaccel.runtime.pipeline.pipelined_batch import PipelineSchedule, group_of_stages, pippy_forward
from hpcaccel.runtime.pipeline.stage_split import generate_device_map, split_points_of
from hpcaccel.runtime.pipeline.traced_model import CallForm, TracedModel, evaluating, split_at

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.process_group import RankGroup

__all__ = ["build_pipeline", "prepare_pippy"]

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


def prepare_pippy(
    model: Model,
    split_points: str | Sequence[str] | None = "auto",
    no_split_module_classes: Collection[str] | str | None = None,
    example_args: Sequence[Any] | None = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> Model:
    """Split a model into one stage for each rank. Calling it then runs the pipeline, in evaluation mode and without
    gradients. All ranks call it; only rank 0's inputs are used, and the last rank returns the output. The batch may
    have any number of rows: it is padded to whole chunks, and the padding is removed from the output.

    With a single rank, the model computes the batch as a whole.

    Args:
        split_points: names of the modules at which the second, third … stage begins, in the order of their calls.
            ``"auto"``: stages of about the same number of bytes, see ``generate_device_map``.
        no_split_module_classes: as in ``generate_device_map``.
        example_args, example_kwargs: inputs of one chunk. The rows of later batches have these shapes and types.
        num_chunks: number of chunks that pass through the stages one after another. Default: the number of ranks. With
            more chunks, the ranks are idle for a smaller part of the time.
        gather_output: whether all ranks return the output. Otherwise, the others return None.

    Returns:
        ``model``, with another ``forward``. Its ``hf_split_points`` are the split points.

    Raises:
        RuntimeMisuse: the example, a split point or their number is not usable; the model is not traceable, has no
            weights, or is a pipeline already; the ranks differ in their arguments; torch is older than 2.7.
    """
    if "pippy_stage" in model.__dict__:
        raise RuntimeMisuse("this model is a pipeline already: create the model again for another pipeline")
    size = group_of_stages().world_size
    num_chunks = size if num_chunks is None else num_chunks
    if split_points is None or isinstance(split_points, str):
        if split_points not in (None, "auto"):
            raise RuntimeMisuse(f"split_points={split_points!r}: pass 'auto' or a list of module names")
        split_points = split_points_of(generate_device_map(model, size, no_split_module_classes), size)
    schedule = build_pipeline(model, split_points, example_args, example_kwargs, num_chunks)
    original, gathered, warned = model.forward, bool(gather_output), False

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        if model.training and not warned:
            warned = True
            log.warning("the pipeline computes in evaluation mode, though the model is in training mode: call eval()")
        return pippy_forward(schedule.step, num_chunks, gathered, *args, **kwargs)

    state = {"_original_forward": original, "_original_call": model.__call__, "pippy_stage": schedule}
    for name, value in {**state, "hf_split_points": list(split_points), "forward": forward}.items():
        object.__setattr__(model, name, value)
    return model


class _WholeModel:
    """The pipeline of a single rank."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model.to(device)
        self._forward = model.forward
        self._device = device

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), evaluating(self._model):
            return self._forward(*send_to_device(args, self._device), **send_to_device(kwargs, self._device))


def build_pipeline(
    model: nn.Module,
    split_points: Iterable[str],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    num_chunks: int,
) -> Any:
    """Trace a model and keep this rank's stage, on this rank's device.

    Args: as in ``prepare_pippy``.

    Returns:
        An object whose ``step`` runs the pipeline on ``num_chunks`` chunks. For a single rank it runs the model.

    Raises: as ``prepare_pippy``.
    """
    if not is_torch_version(">=", "2.7.0"):  # earlier ones execute no Python of the model while they trace it
        raise RuntimeMisuse(f"pipelines need torch 2.7 or later, but torch {torch.__version__} is installed")
    group = group_of_stages()
    points = list(split_points)
    if args is not None and not isinstance(args, tuple | list):
        given = "(x,)" if isinstance(args, torch.Tensor) else "(tensor, ...)"
        raise RuntimeMisuse(f"example_args must be a tuple: example_args={given}. It is a {type(args).__name__}")
    if num_chunks < 1:
        raise RuntimeMisuse(f"num_chunks={num_chunks}: pass a positive number of chunks")
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        raise RuntimeMisuse("the model's weights are on the meta device: load them before prepare_pippy")
    place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    form = CallForm(model.forward, send_to_device(tuple(args or ()), place), send_to_device(dict(kwargs or {}), place))
    if group.exchange is None:
        log.warning("prepare_pippy runs on a single rank, so the model is not split: start several ranks")
        return _WholeModel(model, group.device)
    if len(points) != group.world_size - 1:
        raise RuntimeMisuse(
            f"split_points has {counted(len(points), 'module name')} ({', '.join(points) or 'none'}), which make "
            f"{len(points) + 1} stages, but there are {group.world_size} ranks: pass {group.world_size - 1}, or "
            "split_points='auto'"
        )
    group.exchange.call("prepare_pippy", form=f"{num_chunks} chunks of {form.chunk_rows} rows, split at {points}")
    traced = TracedModel(model, form)
    pipe = _traced(traced, form.example, points)
    inputs = _inputs_of_first_stage(pipe)
    stage = pipe.build_stage(group.rank, device=group.device)
    del pipe  # the other ranks' stages
    return PipelineSchedule(_runner(stage, num_chunks, group, inputs), form, traced.output, num_chunks=num_chunks)


def _traced(traced: TracedModel, example: tuple[torch.Tensor, ...], points: Sequence[str]) -> Any:
    from torch.distributed.pipelining import pipeline

    model = traced.model
    with split_at(model, points) as calls, evaluating(model), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch copies its own deprecated class
        try:
            pipe = pipeline(traced, mb_args=example)
        except RuntimeError as error:
            cause: BaseException = error
            while cause.__cause__ is not None and not isinstance(cause, HpcaccelError):
                cause = cause.__cause__
            if isinstance(cause, HpcaccelError):
                raise cause from None
            reason = next((line for line in str(cause).splitlines() if line.strip()), "no message")
            raise RuntimeMisuse(
                f"torch.export cannot trace {type(model).__name__}: {type(cause).__name__}: {reason}. A pipeline needs "
                "a forward without branches that depend on the values of tensors; for a transformers model, try "
                "use_cache=False and attn_implementation='eager'"
            ) from error
    if pipe.num_stages != len(points) + 1:
        wrong = [name for name in points if calls[name] != 1]
        said = ", ".join(f"{name!r} is called {calls[name]} times" for name in wrong)
        raise RuntimeMisuse(
            f"split_points make {pipe.num_stages} stages instead of {len(points) + 1}: "
            f"{said or 'two of them are at the same place'}. Choose modules that the model calls exactly once"
        )
    return pipe


def _inputs_of_first_stage(pipe: Any) -> list[int]:
    """The indices of the model's input tensors that the first stage takes; the model does not use the others."""
    nodes = list(pipe.info().graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    first = next(node for node in nodes if node.op == "call_module")
    return [inputs.index(node) for node in first.args]


def _runner(
    stage: Any, num_chunks: int, group: RankGroup, inputs: Sequence[int]
) -> Callable[..., Sequence[torch.Tensor] | None]:
    from torch.distributed.pipelining import ScheduleGPipe

    schedule = ScheduleGPipe(stage, num_chunks)

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor] | None:
        with torch.no_grad():
            given = [tensors[index].to(group.device) for index in inputs] if group.rank == 0 else ()
            found = schedule.step(*given)
            stage.clear_runtime_states()  # the activations and outputs of all chunks
        return tree_leaves(found) if group.rank == group.world_size - 1 else None

    return run
