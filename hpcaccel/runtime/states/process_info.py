"""``ProcessInfo``: rank, device and number of processes, and decorators for functions that only some ranks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hpcaccel.runtime.enums import DistributedType

if TYPE_CHECKING:  # imported by the functions that use them: an import of Accelerator costs a tenth without them
    from hpcaccel.runtime.distributed.world import World

__all__ = ["ProcessInfo"]

Function = TypeVar("Function", bound=Callable[..., Any])


class ProcessInfo:
    """Base class of the Accelerator and ``PartialState``. Its properties stay readable after a training has ended."""

    @property
    def _world(self) -> World:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._world.device

    @property
    def distributed_type(self) -> DistributedType:
        """How the training is distributed: FSDP or DEEPSPEED for these strategies, MULTI_CPU, MULTI_GPU, MULTI_XPU …
        for other groups of ranks, and NO for a single process; or the value that the script has set."""
        from hpcaccel.runtime.training_session import TrainingSession

        session = TrainingSession.existing()
        shared = session is not None and session.world is self._world
        return session.distributed_type if session is not None and shared else self._world.distributed_type

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return self._world.env.world_size

    @property
    def process_index(self) -> int:
        """Index of this rank among all ranks, from 0."""
        return self._world.env.rank

    @property
    def local_process_index(self) -> int:
        """Index of this rank among the ranks of its node, from 0."""
        return self._world.env.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._world.env.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self._world.env.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the rank with the highest number."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    # -- collectives ---------------------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until all processes have made this call.

        Raises:
            RuntimeMisuse: some processes do not make this call; the process group has been destroyed.
        """
        self._world.group.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the first process of each node."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Context manager (``with ... as part``) for this process's part of a list, a tuple, a tensor, a dict of these,
        or a dataset. If the items cannot be divided evenly, the first processes get one extra item. A single process
        gets the object itself.

        Args:
            inputs: the same items on every process. Tensors are split along dimension 0; the values of a dict must have
                the same length.
            apply_padding: repeat the last item so that all parts have the same length;
                ``PartialState().gather_for_metrics`` removes the repeated items.

        Raises:
            RuntimeMisuse: ``inputs`` cannot be split.

        Example::

            with hpcaccel.PartialState().split_between_processes(["a", "b", "c"]) as part:
                print(part)  # ['a', 'b'] on rank 0 of 2, ['c'] on rank 1
        """
        from hpcaccel.runtime.distributed.split_between_processes import refuse_unsplittable, split

        world = self._world
        if world.env.world_size == 1:
            refuse_unsplittable(inputs)  # raises the same errors as with several processes
            world.split = None
            yield inputs
            return
        part, world.split = split(inputs, rank=world.env.rank, ranks=world.env.world_size, apply_padding=apply_padding)
        yield part

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Context manager: the main process runs the block before all other processes. All processes must enter the
        block. Use it where rank 0 downloads or preprocesses data that the others then read from a cache."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Context manager: the first process of each node runs the block before the node's other processes. All
        processes of all nodes must enter the block."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            # Also after an error: the other processes wait in this barrier.
            if is_first:
                self.wait_for_everyone()

    def destroy_process_group(self, group: Any = None) -> None:
        """End the training, if there is one, and leave the group of ranks. All ranks must call this. Afterwards the
        process may form a new group. Unlike ``end_training`` this also destroys a default group that the script has
        created.

        Args:
            group: a torch process group; if given, only this group is destroyed.
        """
        if group is not None:
            torch.distributed.destroy_process_group(group)
            return
        from hpcaccel.runtime.distributed.world import World
        from hpcaccel.runtime.training_session import TrainingSession

        session = TrainingSession.existing()
        if session is not None:
            session.end(destroy=True)
        elif (world := World.existing()) is not None:
            world.destroy()

    # -- decorators ---------------------------------------------------------------------------------------------------

    def on_main_process(self, function: Function | None = None) -> Any:
        """Decorator: call the function on the main process only. On other processes the call returns None.

        Example::

            @hpcaccel.PartialState().on_main_process
            def report(loss):
                print(loss)

            report(0.5)  # printed once
        """
        return _only(self, function, lambda info: info.is_main_process)

    def on_local_main_process(self, function: Function | None = None) -> Any:
        """Decorator: call the function on the first process of each node only."""
        return _only(self, function, lambda info: info.is_local_main_process)

    def on_last_process(self, function: Function | None = None) -> Any:
        """Decorator: call the function on the last process only."""
        return _only(self, function, lambda info: info.is_last_process)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Any:
        """Decorator: call the function on the process ``process_index`` only; a single process always calls it."""
        return _only(self, function, lambda info: not info.use_distributed or info.process_index == process_index)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: call the function only on processes whose local rank is ``local_process_index``; a single process
        always calls it."""
        return _only(
            self,
            function,
            lambda info: not info.use_distributed or info.local_process_index == local_process_index,
        )


class _CurrentProcess(ProcessInfo):
    """This process, in functions that were decorated without a ``ProcessInfo`` object."""

    @property
    def _world(self) -> World:
        from hpcaccel.runtime.distributed.world import World

        return World.current()


def _only(info: Any, function: Function | None, condition: Callable[[ProcessInfo], bool]) -> Any:
    """Wrap ``function`` so that it is called only if ``condition`` holds at the time of the call. A decorator may be
    used on the class (``@Accelerator.on_main_process``): then ``info`` is the decorated function."""
    if function is None and not isinstance(info, ProcessInfo):
        info, function = _CurrentProcess(), info
    if function is None:
        return lambda decorated: _only(info, decorated, condition)

    @wraps(function)
    def call_if(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition(info) else None

    return call_if
