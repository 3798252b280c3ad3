"""The ranks that this process belongs to: found once, shared by everything, until the group is destroyed."""

from __future__ import annotations

import atexit
import sys
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import process_group, rank_env
from hpcaccel.runtime.distributed.process_group import Group
from hpcaccel.runtime.distributed.thread_shutdown import settle

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.split_between_processes import Split

__all__ = ["World"]


class World:
    """From the first question for the ranks to ``destroy``; the next question makes another one.

    Raises:
        RankEnvironmentError: the environment describes no usable group of ranks, or they do not find each other.
    """

    _current: World | None = None
    _generations = 0

    def __init__(self, *, cpu: bool, backend: str | None, init_method: str | None, timeout: timedelta) -> None:
        World._generations += 1
        self.generation = World._generations
        """Tells what was prepared for a group that has been destroyed since."""
        self.env = process_group.known_environment() or rank_env.detect()
        if dist.is_initialized():
            self.env = process_group.place_in_scripts_group(self.env)
        self.cpu = cpu
        self.device: torch.device = process_group.choose_device(self.env, cpu=cpu)
        self.timeout = timeout
        self.group: Group = process_group.join(
            self.env, self.device, backend=backend, init_method=init_method, timeout=timeout
        )
        self._debug = rank_env.is_set("ACCELERATE_DEBUG_MODE") or rank_env.is_set("HPCACCEL_DEBUG")
        self.has_session = False
        """A session sees to the end by itself."""
        self.split: Split | None = None
        """What ``split_between_processes`` gave each rank last."""
        if self.env.world_size > 1:
            atexit.register(self._at_exit)

    @classmethod
    def current(
        cls,
        *,
        cpu: bool = False,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
    ) -> World:
        """The world of this process, joined if there is none; the arguments count only then."""
        if cls.existing() is None:
            cpu = cpu or rank_env.is_set("ACCELERATE_USE_CPU") or rank_env.is_set("HPCACCEL_USE_CPU")
            timeout = timeout or timedelta(seconds=process_group.TIMEOUT_SECONDS)
            cls._current = cls(cpu=cpu, backend=backend, init_method=init_method, timeout=timeout)
            return cls._current
        assert cls._current is not None
        cls._current.refuse_changes(cpu=cpu, backend=backend, timeout=timeout)
        return cls._current

    @classmethod
    def existing(cls) -> World | None:
        """The world of this process, unless there is none, or the script has destroyed its group behind its back."""
        if cls._current is not None and not cls._current.group.is_alive:
            cls._current.forget()
        return cls._current

    def refuse_changes(self, *, cpu: bool, backend: str | None = None, timeout: timedelta | None = None) -> None:
        """
        Raises:
            RuntimeMisuse: the group exists, with another device.
        """
        if cpu and self.device.type != "cpu":
            raise RuntimeMisuse(
                f"cpu=True, but this process trains on {self.device} since its first Accelerator() or PartialState(). "
                "Say it there, or call destroy_process_group() first"
            )
        if self.env.world_size > 1 and (backend not in (None, self.backend) or timeout not in (None, self.timeout)):
            warnings.warn(
                f"backend={backend}, timeout={timeout}: the ranks have formed their group already, by an earlier "
                f"PartialState() or Accelerator(), with backend={self.backend}, timeout={self.timeout}. Say it there",
                stacklevel=4,
            )

    @property
    def backend(self) -> str | None:
        """How tensors on the device travel; None where this process is alone."""
        if not dist.is_initialized():
            return None
        names = dict(part.partition(":")[::2] for part in dist.get_backend_config().split(",") if ":" in part)
        return names.get(self.device.type) or dist.get_backend()

    @property
    def debug(self) -> bool:
        """Whether shapes are compared before all collectives, those of GPU tensors too."""
        return self._debug if self.group.exchange is None else self.group.exchange.debug

    @debug.setter
    def debug(self, value: bool) -> None:
        self._debug = bool(value)
        if self.group.exchange is not None:
            self.group.exchange.debug = bool(value)

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
        atexit.unregister(self._at_exit)
        if World._current is self:
            World._current = None

    def destroy(self) -> None:
        """Meet the others and leave the group, the script's own too."""
        if self.group.is_alive:
            self.group.meet_at_exit()
            self.group.leave(whole=True)
        self.forget()

    def _at_exit(self) -> None:
        """The end of a program that never had a session. One that dies of an exception waits for nobody."""
        if not self.has_session and self.group.is_alive:
            failure = getattr(sys, "last_value", None)
            if failure is not None:
                self.group.say_failed(failure)
            elif self.group.meet_at_exit():
                self.group.leave()
        settle()
