"""When memory runs out: a smaller batch, for all ranks alike, and giving back what is no longer needed."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hpcaccel.runtime.distributed.collectives.exchange import Interrupted
from hpcaccel.runtime.distributed.world import World

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]

SMALLER = 0.9
WHAT = "find_executable_batch_size"
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_DONE, _TOO_LARGE = 0, 1


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give memory that torch keeps in reserve back to the GPU; first collect unreachable objects if asked to."""
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """``a, b = release_memory(a, b)``: forget both, and give back the memory that only they held."""
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether memory ran out, on a GPU or in the host, or cuDNN cannot do it at that size."""
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(exception, RuntimeError) and any(text in str(exception) for text in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorator: call the function with a batch size for its first argument, and with a smaller one as long as memory
    runs out; on all ranks with the same one.

    After each try the ranks tell each other how it went, so all of them end the function with the same size, or none.
    A rank that has run out of memory calls back those that wait for it in ``gather`` and its like. It cannot call back
    those that wait in a collective of torch's, say for its gradients: nothing interrupts them. If the script has
    prepared models, that is an error after the control timeout; a smaller ``starting_batch_size`` avoids it.

    Args:
        starting_batch_size: what the first call tries.
        reduce_batch_size_fn: the next size; default: nine tenths of the last one.

    Raises:
        TypeError: it is called with a batch size, too.
        RuntimeError: not even a batch of one fits.
        RuntimeMisuse: other ranks do not end the function, or do not call it.
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
    """Remembers the size that fitted for the next call."""

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
            "No executable batch size found, reached zero. Not even a batch of one sample fits: the model alone is too "
            "large for this memory, or something else holds it"
        )

    def _try(self, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        try:
            result = self._function(self.batch_size, *args, **kwargs)
        except Interrupted:
            return False, None
        except Exception as error:
            if not should_reduce_batch_size(error):
                # The others are told by the process's end, or by the call that they wait in.
                raise
            # The traceback holds on to the function's variables, and so to the memory that ran out.
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
                f"{name}() was called with {len(args)} arguments, a batch size among them, which "
                f"find_executable_batch_size passes first by itself. Call {name}({given})"
            )


def _any_too_large(outcome: int) -> bool:
    """What all ranks found.

    Raises:
        RuntimeMisuse: some ranks do not come.
    """
    group = _group()
    if group is None:
        return outcome == _TOO_LARGE
    too_large = outcome == _TOO_LARGE
    limit = group.exchange.rollcall.control_timeout_seconds if too_large and _shares_gradients() else None
    try:
        answers = group.exchange.call(WHAT, value=outcome, interrupts=too_large, limit=limit)
    except Interrupted:
        return True
    return bool(max(answers.values) == _TOO_LARGE)


def _least(batch_size: int) -> int:
    """The smallest size that any rank wants to go on with."""
    group = _group()
    return batch_size if group is None else -int(group.max_of(-batch_size, WHAT))


def _group() -> Any:
    world = World.existing()
    return None if world is None or world.group.exchange is None else world.group


def _shares_gradients() -> bool:
    from hpcaccel.runtime.training_session import Session

    session = Session.existing()
    return session is not None and bool(session.prepared.models)
