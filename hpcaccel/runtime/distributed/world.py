"""The world of this process: rank environment, device and process groups, created once and shared until destroyed."""

from __future__ import annotations

import atexit
import socket
import sys
import warnings
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import device_backend, process_group, rank_env, xla_device
from hpcaccel.runtime.distributed.collectives.call_site import call_stack
from hpcaccel.runtime.distributed.gpu_affinity import set_numa_affinity
from hpcaccel.runtime.distributed.group_shutdown import settle
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.distributed.rank_env import RankEnvironment
from hpcaccel.runtime.enums import DistributedType

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.split_between_processes import RankSplit

__all__ = ["World", "place_in_scripts_group"]


class World:
    """This process's rank environment, device and process groups. The first call of ``current`` creates the world;
    after ``destroy`` the next call creates another one.

    Raises:
        RankEnvironmentError: the environment describes no valid group of ranks; this node has too few GPUs, or some
            would stay idle; or the rendezvous failed.
        RuntimeMisuse: the backend is not available.
    """

    _current: World | None = None
    _generations = 0

    def __init__(self, *, cpu: bool, backend: str | None, init_method: str | None, timeout: timedelta) -> None:
        World._generations += 1
        self.generation = World._generations
        """Number of this world in this process, by which objects prepared for an earlier world are recognised."""
        self.created_by = call_stack()
        """``file:line`` of the script's frames that created this world, innermost first."""
        self.env = process_group.known_environment() or rank_env.detect()
        if dist.is_initialized():
            self.env = place_in_scripts_group(self.env)
        elif not cpu and device_backend.accelerator() == "xla":
            self.env = xla_device.place_of_spawned(self.env)
        self.cpu = cpu
        self.device: torch.device = process_group.choose_device(self.env, cpu=cpu)
        if self.device.type == "cuda" and rank_env.is_set("ACCELERATE_CPU_AFFINITY"):
            set_numa_affinity(self.device.index)
        self.timeout = timeout
        self.group: RankGroup = process_group.join(
            self.env, self.device, backend=backend, init_method=init_method, timeout=timeout
        )
        self._debug = rank_env.is_set("ACCELERATE_DEBUG_MODE") or rank_env.is_set("HPCACCEL_DEBUG")
        self.has_session = False
        """Whether a training session, which does its own shutdown, uses this world."""
        self.split: RankSplit | None = None
        """The latest split of ``split_between_processes``."""
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
        """The world of this process; if there is none, it is created from the arguments.

        Raises:
            RankEnvironmentError: as in the constructor.
            RuntimeMisuse: as in the constructor and in ``refuse_changes``.
        """
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
        """The world of this process; None if there is none or the script has destroyed its process group."""
        if cls._current is not None and not cls._current.group.is_alive:
            cls._current.forget()
        return cls._current

    def refuse_changes(self, *, cpu: bool, backend: str | None = None, timeout: timedelta | None = None) -> None:
        """If there are several ranks, warn about a backend or timeout that differs from the existing group's.

        Raises:
            RuntimeMisuse: ``cpu`` is set, but the existing group's device is not the CPU.
        """
        if cpu and self.device.type != "cpu":
            raise RuntimeMisuse(
                f"cpu=True, but the first Accelerator() or PartialState() of this process selected {self.device}. "
                "Pass cpu=True there, or call PartialState().destroy_process_group() first"
            )
        if self.env.world_size > 1 and (backend not in (None, self.backend) or timeout not in (None, self.timeout)):
            warnings.warn(
                f"backend={backend}, timeout={timeout} are ignored: an earlier PartialState() or Accelerator() has "
                f"created the process group with backend={self.backend}, timeout={self.timeout}. Pass them there",
                stacklevel=4,
            )

    @property
    def backend(self) -> str | None:
        """Name of the backend for tensors on this rank's device; None if there is no default group."""
        if not dist.is_initialized():
            return None
        names = dict(part.partition(":")[::2] for part in dist.get_backend_config().split(",") if ":" in part)
        return names.get(self.device.type) or dist.get_backend()

    @property
    def distributed_type(self) -> DistributedType:
        """NO for a single rank, else MULTI_CPU, MULTI_GPU, MULTI_XPU …, from the device; always XLA on XLA devices."""
        if self.env.world_size == 1 and self.device.type != "xla":
            return DistributedType.NO
        return device_backend.distributed_type(self.device)

    @property
    def debug(self) -> bool:
        """Whether the ranks compare every collective call, even calls with only GPU tensors."""
        return self._debug if self.group.exchange is None else self.group.exchange.debug

    @debug.setter
    def debug(self, value: bool) -> None:
        self._debug = bool(value)
        if self.group.exchange is not None:
            self.group.exchange.debug = bool(value)

    @property
    def store(self) -> Any:
        """The default group's store, with a key prefix for this world; None for a single process."""
        return self.group.store

    def form_group_of_one(self) -> None:
        """Create a default group for a single process if there is none. Sharding needs a default group."""
        if not dist.is_initialized():
            process_group.initialise_alone(self.device, self.timeout)

    def forget(self) -> None:
        """Make the next call of ``current`` create another world."""
        atexit.unregister(self._at_exit)
        if World._current is self:
            World._current = None

    def destroy(self) -> None:
        """Wait for all ranks and destroy the groups, including a default group that the script has created."""
        if self.group.is_alive:
            self.group.wait_at_exit()
            self.group.leave(whole=True)
        self.forget()

    def _at_exit(self) -> None:
        """Shut down the groups if the program has no training session. After an exception, do not wait for the other
        ranks."""
        if not self.has_session and self.group.is_alive:
            failure = getattr(sys, "last_value", None)
            if failure is not None:
                self.group.publish_failure(failure)
            elif self.group.wait_at_exit():
                self.group.leave()
        settle()


def place_in_scripts_group(env: RankEnvironment) -> RankEnvironment:
    """``env`` with this process's global and local rank in the default group that the script has created, and with that
    group's sizes. All ranks must call this."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if (rank, world) == (env.rank, env.world_size):
        return env
    store = dist.PrefixStore("hpcaccel/hosts", dist.distributed_c10d._get_default_store())
    store.set(str(rank), socket.gethostname())
    hosts = [store.get(str(number)).decode() for number in range(world)]
    return replace(
        env,
        rank=rank,
        world_size=world,
        local_rank=hosts[:rank].count(hosts[rank]),
        local_world_size=hosts.count(hosts[rank]),
        largest_node=max(Counter(hosts).values()),
        source="script",
    )
