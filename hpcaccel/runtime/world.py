"""The ranks that this process belongs to: found once, shared by everything, until the group is destroyed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpcaccel.runtime import env, process_group
from hpcaccel.runtime.process_group import Group

__all__ = ["World"]


class World:
    """From the first question for the ranks to ``destroy``; the next question makes another one.

    Raises:
        RankEnvironmentError: the environment describes no usable group of ranks, or they do not find each other.
    """

    _current: World | None = None
    _generations = 0

    def __init__(self, *, cpu: bool, backend: str | None, timeout: timedelta) -> None:
        World._generations += 1
        self.generation = World._generations
        """Tells what was prepared for a group that has been destroyed since."""
        self.env = env.detect()
        self.cpu = cpu
        self.device: torch.device = process_group.choose_device(self.env, cpu=cpu)
        self.timeout = timeout
        self.group: Group = process_group.join(self.env, self.device, backend=backend, timeout=timeout)

    @classmethod
    def current(cls, *, cpu: bool = False, backend: str | None = None, timeout: timedelta | None = None) -> World:
        """The world of this process, joined if there is none; ``cpu``, ``backend``, ``timeout`` count only then."""
        if cls._current is None:
            seconds = timedelta(seconds=process_group.TIMEOUT_SECONDS)
            cls._current = cls(cpu=cpu, backend=backend, timeout=timeout or seconds)
        return cls._current

    @classmethod
    def existing(cls) -> World | None:
        return cls._current

    @property
    def store(self) -> Any:
        """The store in which the ranks met, with keys of this generation only; None where this process is alone."""
        return self.group.store

    def form_group_of_one(self) -> None:
        """A lone rank's group, which sharding needs."""
        if not dist.is_initialized():
            process_group.initialise_alone(self.device, self.timeout)

    def forget(self) -> None:
        """The next question for the ranks looks anew."""
        if World._current is self:
            World._current = None

    def destroy(self) -> None:
        """Leave the group; all ranks must have met just before."""
        self.group.leave()
        self.forget()
