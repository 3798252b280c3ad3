"""A model in a form that torch.distributed.pipelining can split: a function of tensors, traced for one chunk of
rows."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hpcaccel.core.formatting import did_you_mean
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.collectives.nested_tensors import tensor_kind

__all__ = ["CallForm", "TracedModel", "evaluating", "split_at"]

_NO_EXAMPLE = (
    "prepare_pippy needs an example of the model's inputs, as large as one chunk: pass example_args=(tensor, ...) or "
    "example_kwargs={name: tensor, ...}"
)
_CONSTANTS = (torch.Tensor, str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)
"""Types of the leaves of an output; a leaf of another type might contain tensors."""


class CallForm:
    """The form of a call of the model: its arguments, the types of its tensors, and their number of rows.

    A traced model can only be called in the form of the example. Only the number of rows may differ.

    Args:
        forward: the model's ``forward``, by whose signature positional and keyword arguments are matched.
        args, kwargs: the example, one chunk. Each tensor has its rows along dimension 0.

    Raises:
        RuntimeMisuse: the example does not fit ``forward``, has no tensor, or its tensors differ in their rows.
    """

    def __init__(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._signature = inspect.signature(forward)
        if not args and not kwargs:
            raise RuntimeMisuse(_NO_EXAMPLE)
        leaves, self._spec = self._flattened(args, kwargs)
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        if not self._tensors:
            raise RuntimeMisuse(_NO_EXAMPLE)
        self.chunk_rows = _rows_of(self._tensors, "the example")

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with ``tensors`` in the places of the example's."""
        rest = iter(tensors)
        pairs = zip(self._is_tensor, self._constants, strict=True)
        args, kwargs = tree_unflatten([next(rest) if is_tensor else other for is_tensor, other in pairs], self._spec)
        return args, kwargs

    @property
    def example(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._tensors)

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call.

        Raises:
            RuntimeMisuse: the call differs from the example in more than the number of rows.
        """
        leaves, spec = self._flattened(args, kwargs)
        if spec != self._spec:
            raise RuntimeMisuse(
                f"the pipeline was built for the arguments {self._names(self.filled(self._tensors))}, but called with "
                f"{self._names(tree_unflatten(leaves, spec))}: pass the same arguments as in example_args and "
                "example_kwargs"
            )
        found = [leaf for leaf, is_tensor in zip(leaves, self._is_tensor, strict=True) if is_tensor]
        for leaf, other, is_tensor in zip(leaves, self._constants, self._is_tensor, strict=True):
            if not is_tensor and (type(leaf) is not type(other) or leaf != other):
                raise RuntimeMisuse(
                    f"the pipeline was built for the argument {other!r}, but called with {leaf!r}: pass the same "
                    "value, or build a pipeline with another example"
                )
        for tensor, example in zip(found, self._tensors, strict=True):
            if not isinstance(tensor, torch.Tensor) or _row(tensor) != _row(example):
                given = _row(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise RuntimeMisuse(
                    f"the pipeline was built for rows of {_row(example)}, but called with {given}: pad the input to "
                    "the example's size, or build a pipeline with another example"
                )
        return found

    def rows(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Number of rows of a call. Raises the errors of ``tensors``."""
        return _rows_of(self.tensors(args, kwargs), "the batch")

    def _flattened(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], TreeSpec]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise RuntimeMisuse(
                f"the model's forward{self._signature} does not take these arguments: {error}"
            ) from None
        return tree_flatten((bound.args, dict(sorted(bound.kwargs.items()))))

    def _names(self, call: Any) -> str:
        return ", ".join(self._signature.bind(*call[0], **call[1]).arguments) or "none"


def _row(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape[1:])}"


def _rows_of(tensors: Sequence[torch.Tensor], what: str) -> int:
    rows = {tensor.shape[0] if tensor.ndim else None for tensor in tensors}
    if len(rows) > 1 or rows & {None, 0}:
        shapes = ", ".join(f"{tensor_kind(tensor)}{list(tensor.shape)}" for tensor in tensors)
        raise RuntimeMisuse(f"all tensors of {what} must have the same number of rows (dimension 0): they are {shapes}")
    return int(rows.pop() or 0)


class TracedModel(nn.Module):
    """The model as a function from its input tensors to a tuple of its output tensors.

    Inputs are copied first. The first stage then has them all, and passes them on like activations: torch cannot pass
    an input to a later stage. Constants and the containers of the output are kept here, because stages exchange only
    tensors.
    """

    def __init__(self, model: nn.Module, form: CallForm) -> None:
        super().__init__()
        self.model = model
        self._form = form
        self._record = _Record()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._form.filled([tensor.clone() for tensor in tensors])
        leaves, spec = tree_flatten(self.model(*args, **kwargs))
        found = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        self._check(leaves, found)
        self._record.output = OutputForm([_HOLE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
        return found

    def _check(self, leaves: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        rows = self._form.chunk_rows
        if others := [leaf for leaf in leaves if not isinstance(leaf, _CONSTANTS)]:
            raise RuntimeMisuse(
                f"the model returns a {type(others[0]).__name__}, which stages cannot pass on: let it return "
                "tensors in lists, tuples and dicts; a model of transformers needs use_cache=False"
            )
        if wrong := [tensor for tensor in outputs if not tensor.ndim or tensor.shape[0] != rows]:
            raise RuntimeMisuse(
                f"the model returns a tensor of shape {list(wrong[0].shape)} for {rows} rows: the outputs of several "
                "chunks can only be joined if each tensor has a row for each input row. Leave out what makes the model "
                "return it, such as labels for a loss"
            )

    @property
    def output(self) -> OutputForm:
        """The containers of the output, known once the model has been traced."""
        assert self._record.output is not None
        return self._record.output


class _Record:
    """Observations of the trace. torch.export resets the attributes of a module that it has traced, and their lists."""

    output: OutputForm | None = None


class _Hole:
    """The place of a tensor."""


_HOLE = _Hole()


class OutputForm:
    """The containers and the constants of the model's output."""

    def __init__(self, leaves: list[Any], spec: TreeSpec) -> None:
        self._leaves = leaves
        self.spec = spec

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        rest = iter(tensors)
        return tree_unflatten([next(rest) if leaf is _HOLE else leaf for leaf in self._leaves], self.spec)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode, without the cache of keys and values that models of transformers return by
    default: no later call could use it, and all stages would send theirs to the last one. Restores both afterwards."""
    training = [module for module in model.modules() if module.training]
    configs = {id(one): one for module in model.modules() if (one := getattr(module, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for module in training:
        module.training = False
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for config in caching:
            config.use_cache = True


@contextmanager
def split_at(model: nn.Module, points: Sequence[str]) -> Iterator[Counter[str]]:
    """Context manager: begin a stage at each of these modules while the model is traced.

    Yields:
        How often each of the modules has been called.

    Raises:
        RuntimeMisuse: the model has no such module.
    """
    from torch.distributed.pipelining import pipe_split

    calls: Counter[str] = Counter()
    modules = dict(model.named_modules())
    own: dict[nn.Module, Any] = {}

    def begin(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def split_first(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            pipe_split()  # type: ignore[no-untyped-call]
            return forward(*args, **kwargs)

        return split_first

    for name in points:
        if name not in modules or not name:
            hint = did_you_mean(str(name), modules, cutoff=0.6)
            raise RuntimeMisuse(f"split_points: {type(model).__name__} has no module {name!r}{hint}")
    try:
        for name in points:
            module = modules[name]
            own.setdefault(module, module.__dict__.get("forward"))
            module.forward = begin(name, module.forward)
        yield calls
    finally:
        for module, forward in own.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward
