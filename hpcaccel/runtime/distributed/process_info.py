"""Where this process stands among the ranks, and what only some of them do: for Accelerator and states alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from hpcaccel.runtime.enums import DistributedType

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.world import World
    from hpcaccel.runtime.training_session import Session

__all__ = ["Standing", "distributed_type"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Standing:
    """Whatever has a world of ranks. After the end of the training it still knows where it stood."""

    _of_this_process: ClassVar[Callable[[], Standing]]
    """``PartialState``, for functions that are decorated before there is an object."""

    @property
    def _world(self) -> World:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return self._world.device

    @property
    def distributed_type(self) -> DistributedType:
        """NO, MULTI_CPU or MULTI_GPU; FSDP where models are sharded."""
        from hpcaccel.runtime.training_session import Session

        return distributed_type(self._world, Session.existing())

    @property
    def num_processes(self) -> int:
        return self._world.env.world_size

    @property
    def process_index(self) -> int:
        return self._world.env.rank

    @property
    def local_process_index(self) -> int:
        """This process's number on its node."""
        return self._world.env.local_rank

    @property
    def is_main_process(self) -> bool:
        return self._world.env.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """The first process of its node."""
        return self._world.env.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    # -- together ------------------------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Until all processes are here.

        Raises:
            RuntimeMisuse: some do not come; the group has been left.
        """
        self._world.group.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` once a node."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """``with ... as part``: this process's part of a list, a tuple, a tensor, a dict of them, or a dataset.

        The first processes get one more where the length does not divide; ``apply_padding`` repeats the last item so
        that all parts are equally long, and ``gather_for_metrics`` leaves out what was repeated. A single process gets
        the object itself.

        Raises:
            RuntimeMisuse: it cannot be split.
        """
        from hpcaccel.runtime.distributed.split_between_processes import refuse_unsplittable, split

        world = self._world
        if world.env.world_size == 1:
            refuse_unsplittable(inputs)  # as on several ranks
            world.split = None
            yield inputs
            return
        part, world.split = split(inputs, rank=world.env.rank, ranks=world.env.world_size, apply_padding=apply_padding)
        yield part

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process goes through the block before all others."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """On each node its main process goes through the block before the others."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            # After an error too: the others wait for this one, and are not to wait for ever.
            if is_first:
                self.wait_for_everyone()

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the group of ranks, all together, and end the training if there is one. Then everything may begin
        anew. With ``group``: only that one of torch's.

        A default group that the script has formed by itself is destroyed too; ``end_training`` leaves it alone.
        """
        if group is not None:
            torch.distributed.destroy_process_group(group)
            return
        from hpcaccel.runtime.distributed.world import World
        from hpcaccel.runtime.training_session import Session

        session = Session.existing()
        if session is not None:
            session.end(destroy=True)
        elif (world := World.existing()) is not None:
            world.destroy()

    # -- only some -----------------------------------------------------------------------------------------------------

    def on_main_process(self, function: Function | None = None) -> Any:
        """Decorator: call the function on the main process only; elsewhere None comes back."""
        return _only(self, function, lambda standing: standing.is_main_process)

    def on_local_main_process(self, function: Function | None = None) -> Any:
        """Decorator: call the function on the first process of each node only."""
        return _only(self, function, lambda standing: standing.is_local_main_process)

    def on_last_process(self, function: Function | None = None) -> Any:
        """Decorator: call the function on the last process only."""
        return _only(self, function, lambda standing: standing.is_last_process)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Any:
        """Decorator: call the function on the process ``process_index`` only; a single process always calls it."""
        return _only(
            self, function, lambda standing: not standing.use_distributed or standing.process_index == process_index
        )

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: call the function on this process of each node only; a single process always calls it."""
        return _only(
            self,
            function,
            lambda standing: not standing.use_distributed or standing.local_process_index == local_process_index,
        )


def _only(standing: Any, function: Function | None, belongs: Callable[[Standing], bool]) -> Any:
    """Decide when the function is called, so that it may be decorated before the ranks are known, as
    ``@Accelerator.on_main_process`` above a function does: then the function stands where the object would."""
    if function is None and not isinstance(standing, Standing):
        standing, function = None, standing
    if function is None:
        return lambda decorated: _only(standing, decorated, belongs)

    @wraps(function)
    def called_on_some(*args: Any, **kwargs: Any) -> Any:
        if belongs(standing if standing is not None else Standing._of_this_process()):
            return function(*args, **kwargs)
        return None

    return called_on_some


def distributed_type(world: World, session: Session | None) -> DistributedType:
    """How the ranks of this world work together, in this session if it is one of theirs."""
    if session is not None and session.world is world:
        if session.distributed_type is not None:
            return DistributedType(session.distributed_type)
        if session.settings.strategy == "fsdp":
            return DistributedType.FSDP
    if world.env.world_size == 1:
        return DistributedType.NO
    return DistributedType.MULTI_GPU if world.device.type == "cuda" else DistributedType.MULTI_CPU
