"""Joining the group of ranks, and leaving it.

Three groups: the default one is the user's and the gradients' (NCCL where there are GPUs, gloo elsewhere); the control
group is gloo on its own sockets, for the agreement on when to stop and for checkpoints, and so is the one for what the
script calls by itself: none meets a collective that belongs to another.

Groups come and go, the store in which the ranks met stays: each time they are formed, their keys have another prefix.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcaccel.errors import RankEnvironmentError, RuntimeMisuse
from hpcaccel.runtime.distributed.device import choose_device
from hpcaccel.runtime.distributed.rank_env import RankEnvironment
from hpcaccel.runtime.distributed.thread_shutdown import settle

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.collectives.exchange import Exchange

__all__ = ["Group", "choose_device", "initialise_alone", "join", "known_environment", "place_in_scripts_group"]

TIMEOUT_SECONDS = 1800.0
GLOO_MARGIN_SECONDS = 60.0
EXIT_WAIT_SECONDS = 1800.0
"""How long a rank that has reached the end of the program waits for the others, of which one may have something to do
alone: srun would end all of them a minute after the first. The supervisor finds ranks that wait in vain; without one,
this is the limit."""

_made: Any = None
"""The default group, if it was formed here and not by the script."""
_formed = 0
"""How often; the same in every rank, for all form together."""
_exported: tuple[int, RankEnvironment] | None = None


@dataclass(frozen=True)
class Group:
    """The ranks that train together. The groups are None where this process is alone.

    ``control`` carries the stop agreement and checkpoints, ``calls`` what the script calls by itself: so neither meets
    a collective that belongs to the other, even when some ranks call and some do not. ``data_rank`` and ``data_size``
    say which part of the data this rank trains on; ranks that share each tensor see the same part.
    """

    env: RankEnvironment
    device: torch.device
    control: dist.ProcessGroup | None
    calls: dist.ProcessGroup | None = None
    store: Any | None = None
    tensor_size: int = 1
    default: Any | None = None
    """The default group at the time; another one, or none, means that these groups are gone."""
    timeout: timedelta = timedelta(seconds=TIMEOUT_SECONDS)
    """Of what the script calls and of the gradients' way."""
    exchange: Exchange | None = None
    """Through which all that the script calls goes."""

    @property
    def is_alive(self) -> bool:
        return self.default is None or self.default is dist.group.WORLD

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def world_size(self) -> int:
        return self.env.world_size

    @property
    def is_main(self) -> bool:
        return self.env.rank == 0

    @property
    def data_rank(self) -> int:
        return self.env.rank // self.tensor_size

    @property
    def data_size(self) -> int:
        return self.env.world_size // self.tensor_size

    def barrier(self, what: str = "wait_for_everyone") -> None:
        """Wait for all ranks, and for this rank's own device.

        Raises:
            RuntimeMisuse: ranks are missing; see ``collective_watchdog``.
        """
        if self.exchange is not None:
            self.refuse_if_left()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            self.exchange.call(what)

    def refuse_if_left(self) -> None:
        """
        Raises:
            RuntimeMisuse: the group has been left, by ``end_training`` or ``destroy_process_group``.
        """
        if not self.is_alive:
            raise RuntimeMisuse(
                "the ranks have left their group (end_training or destroy_process_group): nothing can be done together "
                "any more. Make a new Accelerator() or PartialState(), or call prepare(), which begins another training"
            )

    def max_of(self, value: int, what: str = "the agreement on the step") -> int:
        """The largest of all ranks' values."""
        return value if self.exchange is None else max(self.exchange.call(what, value=value).values)

    def from_main(self, value: Any, what: str = "prepare") -> Any:
        """Rank 0's value, on every rank."""
        if self.exchange is None:
            return value
        from hpcaccel.runtime.distributed.collectives.objects import from_rank

        return from_rank(self.exchange, value, source=0, what=what)

    def meet(self, what: str = "the end of the training") -> None:
        """Wait for all ranks."""
        if self.exchange is not None:
            self.exchange.call(what)

    def say_failed(self, error: BaseException) -> None:
        """This rank dies of ``error``: for those who wait for it. Nothing that it has begun keeps it from ending."""
        if self.exchange is not None:
            from hpcaccel.runtime.distributed.abandoned_groups import abandon
            from hpcaccel.runtime.distributed.collectives.call_site import site_of

            lines = str(error).strip().splitlines() or [""]
            self.exchange.rollcall.say_failed(f"at {site_of(error.__traceback__)}: {type(error).__name__}: {lines[0]}")
            abandon()

    def meet_at_exit(self) -> bool:
        """Wait a bounded time for all ranks to reach the end of the program; False where some did not come."""
        if self.control is None:
            return True
        assert self.exchange is not None
        if self.exchange.rollcall.broken is not None:
            return False
        self.exchange.rollcall.say_at_end()
        why = self.exchange.rollcall.meet_at_end(EXIT_WAIT_SECONDS)
        if why is not None:
            from hpcaccel.runtime.distributed.abandoned_groups import abandon

            print(f"hpcaccel: rank {self.rank} leaves without the others: {why}", file=sys.stderr, flush=True)
            abandon()
            return False
        self.exchange.rollcall.say_here()  # a last save may follow
        return True

    def leave(self, *, whole: bool = False) -> None:
        """Destroy the groups. All ranks must have met just before: a rank that goes early makes others abort.

        A default group that the script has formed by itself stays, unless ``whole``.
        """
        global _made
        current = dist.group.WORLD
        if current is None:
            return
        settle()
        if whole or current is _made:
            dist.destroy_process_group()
            _made = None
        elif current is self.default:
            for own in (self.control, self.calls):
                if own is not None:
                    dist.destroy_process_group(own)


def join(
    env: RankEnvironment,
    device: torch.device,
    *,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
) -> Group:
    """Form the groups; a group that the script has formed already is used as it is.

    Args:
        backend: torch's name of one; default: NCCL for GPU tensors, gloo for the others.
        init_method: a URL of torch's (``tcp://``, ``file://``) for where the ranks meet, instead of the environment.
        timeout: for the ranks to find each other, of the default group, and of the script's own collectives.

    Raises:
        RankEnvironmentError: the ranks did not find each other.
        RuntimeMisuse: the backend is not there.
    """
    global _formed
    timeout = timeout or timedelta(seconds=TIMEOUT_SECONDS)
    if env.world_size == 1:
        return Group(env, device, None, default=dist.group.WORLD, timeout=timeout)
    # What many ranks need and one does not.
    from hpcaccel.runtime.distributed.collectives.collective_watchdog import Rollcall
    from hpcaccel.runtime.distributed.collectives.exchange import Exchange

    _formed += 1
    if dist.group.WORLD is None:
        _form(env, device, backend or _backend(device), init_method, timeout)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    # Whoever waits too long is to say it before gloo does, which knows neither the call nor the missing ranks.
    calls = dist.new_group(backend="gloo", timeout=timeout + timedelta(seconds=GLOO_MARGIN_SECONDS))
    store = dist.PrefixStore(f"hpcaccel/{_formed}", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    rollcall = Rollcall(rank=env.rank, world_size=env.world_size, store=store, timeout_seconds=timeout.total_seconds())
    group = Group(
        env,
        device,
        control,
        calls,
        store,
        default=dist.group.WORLD,
        timeout=timeout,
        exchange=Exchange(calls, rollcall),
    )
    # A rank that is through may leave at once, and the others would find its sockets closed while they still connect.
    group.meet()
    return group


def initialise_alone(device: torch.device, timeout: timedelta) -> None:
    """A default group of this process alone."""
    global _made
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(_backend(device), store=store, rank=0, world_size=1, timeout=timeout, **_device_id(device))
    _made = dist.group.WORLD


def place_in_scripts_group(env: RankEnvironment) -> RankEnvironment:
    """This process's place in the default group that the script has formed, whatever the environment says."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if (rank, world) == (env.rank, env.world_size):
        return env
    store = dist.PrefixStore("hpcaccel/hosts", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
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


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _device_id(device: torch.device) -> dict[str, Any]:
    return {"device_id": device} if device.type == "cuda" else {}


def _form(
    env: RankEnvironment, device: torch.device, backend: str, init_method: str | None, timeout: timedelta
) -> None:
    """All ranks have checked in at the store, so what goes wrong from here on is the network's or the backend's."""
    global _made
    from hpcaccel.runtime.distributed.rendezvous import base_store

    hook = sys.excepthook
    _refuse_backend(backend, device)
    _export(env, where=init_method is None)
    store = dist.PrefixStore(  # type: ignore[attr-defined]
        f"group/{_formed}", base_store(env, init_method=init_method, timeout=timeout)
    )
    try:
        dist.init_process_group(
            backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout, **_device_id(device)
        )
    except (RuntimeError, ValueError) as error:
        raise RankEnvironmentError(
            f"rank {env.rank} of {env.world_size} met the others at {env.master_addr}, but could not form the "
            f"{backend} group: {error}. Can the nodes reach each other on any port? GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME name the network interface to use"
        ) from error
    if _formed > 1:
        sys.excepthook = hook  # torch puts one more in front each time, each with its prefix
    _made = dist.group.WORLD


def _export(env: RankEnvironment, *, where: bool) -> None:
    """Tell libraries of the script, which read torchrun's variables, too."""
    global _exported
    _exported = (os.getpid(), env)
    for name, value in env.variables.items():
        if where or not name.startswith("MASTER_"):
            os.environ.setdefault(name, value)


def known_environment() -> RankEnvironment | None:
    """What this process has read from its environment and written there since."""
    return _exported[1] if _exported is not None and _exported[0] == os.getpid() else None


def _refuse_backend(backend: str, device: torch.device) -> None:
    for part in backend.split(","):
        name = part.rpartition(":")[2].lower()
        if not dist.is_backend_available(name) or (name == "nccl" and not torch.cuda.is_available()):
            raise RuntimeMisuse(
                f"InitProcessGroupKwargs(backend={backend!r}): torch {torch.__version__} has no {name!r} here, and the "
                f"device of this rank is {device}. Leave the backend out: gloo and NCCL are chosen by the device"
            )
