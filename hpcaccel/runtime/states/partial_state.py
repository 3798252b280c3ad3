"""``PartialState``: rank, device and number of processes, and gathering, without an Accelerator."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import device_backend
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.launch_env import parse_flag_from_env
from hpcaccel.runtime.states.process_info import ProcessInfo

__all__ = ["PartialState", "SharedState"]


class SharedState:
    """Descriptor for ``_shared_state``, a dict that is empty until the state exists. Scripts for Accelerate check
    whether it is empty."""

    def __get__(self, instance: Any, owner: Any) -> dict[str, Any]:
        found: dict[str, Any] = owner._shared_values()
        return found


class PartialState(ProcessInfo):
    """Rank, device and number of processes. Forms the process group if there is none; an Accelerator uses the same
    group.

    Args:
        cpu: do not use GPUs.
        backend, init_method, timeout: as in ``InitProcessGroupKwargs``, used when the group is formed.

    Raises:
        RankEnvironmentError: the environment does not describe a valid group of ranks, or the rendezvous failed.
        RuntimeMisuse: a keyword is unknown; ``backend`` is not available; ``cpu`` is set, but the group uses GPUs.
    """

    _shared_state: ClassVar[SharedState] = SharedState()
    _last: ClassVar[World | None] = None

    def __init__(
        self,
        cpu: bool = False,
        *,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in kwargs.items():
            raise RuntimeMisuse(
                f"PartialState({name}={value!r}): unknown keyword argument {name!r}. "
                "Use one of: cpu, backend, init_method, timeout"
            )
        PartialState._last = World.current(cpu=cpu, backend=backend, init_method=init_method, timeout=timeout)

    @property
    def _world(self) -> World:
        world = World.existing() or PartialState._last
        if world is None:
            raise AttributeError("PartialState has been reset: call PartialState() again")
        return world

    @classmethod
    def _shared_values(cls) -> dict[str, Any]:
        if World.existing() is None:
            return {}
        state = cls.__new__(cls)
        return {name: getattr(state, name) for name in _SHOWN}

    @staticmethod
    def _reset_state() -> None:
        """Drop the references to the world. The process group remains, and the next state uses it."""
        PartialState._last = None
        world = World.existing()
        if world is not None:
            world.forget()

    @property
    def initialized(self) -> bool:
        """Whether this process belongs to a group of ranks already."""
        return World.existing() is not None

    @property
    def backend(self) -> str | None:
        """Backend of collectives on the device: ``nccl``, ``gloo``, ``xccl`` …; None for a single process."""
        return self._world.backend if self.use_distributed else None

    @property
    def debug(self) -> bool:
        """Whether shapes are compared before all collectives, including those of GPU tensors. Scripts may set it."""
        return self._world.debug

    @debug.setter
    def debug(self, value: bool) -> None:
        self._world.debug = value

    @property
    def fork_launched(self) -> bool:
        """Whether ``notebook_launcher`` or ``debug_launcher`` has forked this process."""
        return parse_flag_from_env("FORK_LAUNCHED")

    @property
    def default_device(self) -> torch.device:
        """This machine's kind of device: ``cuda``, ``xpu``, ``mps`` …, or ``cpu``."""
        return torch.device(device_backend.accelerator())

    def set_device(self) -> None:
        """Make this process's device torch's current device."""
        if self.device.type != "cpu":
            device_backend.set_device(self.device)

    def gather(self, value: Any) -> Any:
        """Concatenate all processes' tensors, or lists of other objects, in rank order, on every process.

        Raises:
            RuntimeMisuse: types, shapes or containers differ among the processes; some processes do not make this call;
                the process group has been destroyed.
        """
        from hpcaccel.runtime.distributed.collectives.padding import gather_samples

        self._world.group.refuse_if_left()
        return gather_samples(value, self._world.group, samples=None, valid=None)

    def gather_for_metrics(self, value: Any) -> Any:
        """``gather``, without the items that the last ``split_between_processes(..., apply_padding=True)`` repeated.

        The repeated items are removed from tensors and lists that have as many entries as a process's part; other
        values are gathered in full.
        """
        from hpcaccel.runtime.distributed.collectives.padding import gather_samples

        split = self._world.split
        if split is None or not split.padded:
            return self.gather(value)
        self._world.group.refuse_if_left()
        return gather_samples(value, self._world.group, samples=split.longest, valid=split.real(self.process_index))

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


_SHOWN = ("backend", "debug", "device", "distributed_type", "local_process_index", "num_processes", "process_index")
