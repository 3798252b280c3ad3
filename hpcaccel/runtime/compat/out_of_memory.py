"""Out-of-memory handling: retry with a smaller batch on all ranks, release cached memory."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hpcaccel.runtime.distributed import device_backend
from hpcaccel.runtime.distributed.collectives.exchange import ExchangeInterrupted
from hpcaccel.runtime.distributed.world import World

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]

SMALLER = 0.9
"""Default ratio of the next batch size to the one that did not fit."""
WHAT = "find_executable_batch_size"
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Parts of RuntimeErrors' messages that mean that the batch is too large."""
_DONE, _TOO_LARGE = 0, 1


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release the memory of GPUs and other devices that torch has cached.

    Args:
        garbage_collection: collect unreachable objects first.
    """
    if garbage_collection:
        gc.collect()
    device_backend.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Release unused memory, and return one None per object: ``a, b = release_memory(a, b)`` drops both objects."""
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether the exception means that memory ran out, on a GPU or on the host, or that cuDNN does not support this
    size."""
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(exception, RuntimeError) and any(text in str(exception) for text in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorator: call the function with a batch size as its first argument, and as long as memory runs out, call it
    again with a smaller batch size. All ranks use the same batch size.

    After each call the ranks exchange their outcomes, so that all ranks return with the same size, or no rank returns.
    A rank that runs out of memory interrupts ranks that wait for it in hpcaccel's collectives of CPU tensors and
    objects. It cannot interrupt ranks that wait in a torch collective, such as a gradient all-reduce. If the script has
    prepared models, the rank that ran out of memory then raises RuntimeMisuse after ``runtime.control_timeout_seconds``
    (a minute by default); use a smaller ``starting_batch_size``.

    Args:
        starting_batch_size: size of the first call.
        reduce_batch_size_fn: returns the next size; default: nine tenths of the previous one, rounded down.

    Raises:
        TypeError: the caller has passed a batch size.
        RuntimeError: no batch size fits: the next one would be zero.
        RuntimeMisuse: other ranks do not return from the function, or do not call it.

    Example::

        @hpcaccel.find_executable_batch_size(starting_batch_size=64)
        def train(batch_size):
            loader = DataLoader(dataset, batch_size=batch_size)
            return len(loader)

        train()  # without the batch size
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    search = _Search(function, starting_batch_size, reduce_batch_size_fn)

    @functools.wraps(function)
    def with_batch_size(*args: Any, **kwargs: Any) -> Any:
        return search(*args, **kwargs)

    return with_batch_size


class _Search:
    """Search for a batch size that fits. Later calls of the function start with the size that was found."""

    def __init__(self, function: Callable[..., Any], batch_size: int, smaller: Callable[[], int] | None) -> None:
        self.batch_size = batch_size
        self._function = function
        self._smaller = smaller or (lambda: int(self.batch_size * SMALLER))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_batch_size(args)
        clear_device_cache(garbage_collection=True)
        while self.batch_size > 0:
            fitted, result = self._try(*args, **kwargs)
            if fitted:
                return result
            clear_device_cache(garbage_collection=True)
            self.batch_size = _least(self._smaller())
        raise RuntimeError(
            "No executable batch size found, reached zero. Not even the smallest batch that was tried fits: the model "
            "is too large for this memory, or another program is using it"
        )

    def _try(self, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        try:
            result = self._function(self.batch_size, *args, **kwargs)
        except ExchangeInterrupted:
            return False, None
        except Exception as error:
            if not should_reduce_batch_size(error):
                # Other ranks notice the end of this process, or time out in the call in which they wait.
                raise
            # The traceback references the function's variables, which keeps their memory in use.
            error.__traceback__ = None
            outcome, result = _TOO_LARGE, None
        else:
            outcome = _DONE
        return not _any_too_large(outcome), result

    def _refuse_batch_size(self, args: tuple[Any, ...]) -> None:
        names = list(inspect.signature(self._function).parameters)
        if len(names) < len(args) + 1:
            name = self._function.__name__
            given = ", ".join(f"{key}={value!r}" for key, value in zip(names[1:], args[1:], strict=False))
            raise TypeError(
                f"{name}() was called with {len(args)} argument{'s' if len(args) != 1 else ''}, including a batch "
                f"size, but find_executable_batch_size passes the batch size itself. Call {name}({given})"
            )


def _any_too_large(outcome: int) -> bool:
    """Whether any rank ran out of memory. A collective call.

    Raises:
        RuntimeMisuse: some ranks do not make this call.
    """
    group = _group()
    if group is None:
        return outcome == _TOO_LARGE
    too_large = outcome == _TOO_LARGE
    limit = group.exchange.watchdog.control_timeout_seconds if too_large and _shares_gradients() else None
    try:
        outcomes = group.exchange.call(WHAT, value=outcome, interrupts=too_large, limit=limit)
    except ExchangeInterrupted:
        return True
    return bool(max(outcomes.values) == _TOO_LARGE)


def _least(batch_size: int) -> int:
    """The smallest next batch size of any rank."""
    group = _group()
    return batch_size if group is None else -int(group.max_of(-batch_size, WHAT))


def _group() -> Any:
    world = World.existing()
    return None if world is None or world.group.exchange is None else world.group


def _shares_gradients() -> bool:
    from hpcaccel.runtime.training_session import TrainingSession

    session = TrainingSession.existing()
    return session is not None and bool(session.prepared.models)
