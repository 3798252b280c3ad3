"""The process groups of a training: creation, barriers, shutdown.

Several ranks share three groups. The default group (NCCL for GPUs, the vendor's library for other accelerators, else
gloo) is for gradients, the user's own collectives, and GPU tensors in hpcaccel's collectives. The control group (gloo)
is for the stop agreement and checkpoints. A further gloo group is for CPU tensors and objects in hpcaccel's
collectives, and for comparing these calls between ranks.

The rendezvous store lives as long as the process. Each time groups are created, their store keys get a new prefix.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcaccel.errors import RankEnvironmentError, RuntimeMisuse
from hpcaccel.runtime.distributed import device_backend, xla_device
from hpcaccel.runtime.distributed.device_mesh import choose_device
from hpcaccel.runtime.distributed.group_shutdown import keep_groups, settle
from hpcaccel.runtime.distributed.rank_env import RankEnvironment
from hpcaccel.runtime.distributed.wide_groups import connect_on_demand

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.collectives.exchange import Exchange

__all__ = ["RankGroup", "choose_device", "initialise_alone", "join", "known_environment"]

TIMEOUT_SECONDS = 1800.0
"""Timeout of the control group; default timeout of the rendezvous, the default group and the script's collectives."""
GLOO_MARGIN_SECONDS = 60.0
"""Time by which gloo's timeout exceeds the watchdog's."""
EXIT_WAIT_SECONDS = 1800.0
"""How long a rank waits for the other ranks at the end of the program. Other ranks may still be working, and hpcaccel
starts srun with ``--wait=60``, which kills all ranks a minute after the first one exits. A supervisor detects hangs
earlier."""

_own_group: Any = None
"""The default group, if it was created here and not by the script."""
_joins = 0
"""Number of calls to ``join`` with several ranks; the same on all ranks."""
_exported: tuple[int, RankEnvironment] | None = None
"""Process id and rank environment in the latest call of ``_export``."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks that train together. ``control`` and ``calls`` are None for a single process.

    ``control`` is for the stop agreement and checkpoints, ``calls`` for the script's collectives, so that the two never
    mix, even if only some ranks make a call. Of ``data_size`` parts of the data, this rank reads part ``data_rank``;
    tensor-parallel and context-parallel ranks share one part.
    """

    env: RankEnvironment
    device: torch.device
    control: dist.ProcessGroup | None
    calls: dist.ProcessGroup | None = None
    store: Any | None = None
    ranks_per_batch: int = 1
    """Number of neighbouring ranks that read the same part of the data."""
    default: Any | None = None
    """torch's default group at creation. If torch has another one by now, these groups have been destroyed."""
    timeout: timedelta = timedelta(seconds=TIMEOUT_SECONDS)
    """Timeout of the script's collectives, and of a default group created by hpcaccel."""
    exchange: Exchange | None = None
    """Makes the collective calls on ``calls``; None for a single process."""

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
        return self.env.rank // self.ranks_per_batch

    @property
    def data_size(self) -> int:
        return self.env.world_size // self.ranks_per_batch

    def barrier(self, what: str = "wait_for_everyone") -> None:
        """Wait for all ranks and for the current stream of this rank's device. A single process does not wait.

        Raises:
            RuntimeMisuse: ranks are missing (see ``collective_watchdog``), or the group has ended.
            RankFailed: another rank has failed.
        """
        if self.exchange is not None:
            self.refuse_if_left()
            device_backend.synchronize(self.device)
            self.exchange.call(what)

    def refuse_if_left(self) -> None:
        """Check that this process has not left the group.

        Raises:
            RuntimeMisuse: ``end_training`` or ``destroy_process_group`` has ended the group.
        """
        if not self.is_alive:
            raise RuntimeMisuse(
                "end_training() or destroy_process_group() has ended the process group, so no collective call is "
                "possible. Create a new Accelerator() or PartialState(), or call prepare() to start another training"
            )

    def max_of(self, value: int, what: str = "the agreement on the step number") -> int:
        """The largest ``value`` of all ranks, on every rank."""
        return value if self.exchange is None else max(self.exchange.call(what, value=value).values)

    def from_main(self, value: Any, what: str = "prepare") -> Any:
        """Rank 0's ``value``, on every rank."""
        return value if self.exchange is None else self.exchange.object_from(0, value, what=what)

    def wait_for_all(self, what: str = "the end of the training") -> None:
        """Wait for all ranks, but not for this rank's device."""
        if self.exchange is not None:
            self.exchange.call(what)

    def publish_failure(self, error: BaseException) -> None:
        """Publish for the other ranks that this rank failed with ``error``. This rank will not wait for them at
        exit."""
        if self.exchange is not None:
            from hpcaccel.runtime.distributed.collectives.call_site import site_of

            lines = str(error).strip().splitlines() or [""]
            reason = f"at {site_of(error.__traceback__)}: {type(error).__name__}: {lines[0]}"
            self.exchange.watchdog.publish_failure(reason)
            keep_groups()

    def wait_at_exit(self) -> bool:
        """Wait up to ``EXIT_WAIT_SECONDS`` for all ranks to reach the end of the program. Returns whether all did."""
        if self.exchange is None:
            return True
        watchdog = self.exchange.watchdog
        if watchdog.failure is not None:
            return False
        watchdog.publish_end()
        problem = watchdog.end_barrier.wait(EXIT_WAIT_SECONDS)
        if problem is not None:
            print(
                f"hpcaccel: rank {self.rank} is exiting without waiting any longer for the other ranks: {problem}",
                file=sys.stderr,
                flush=True,
            )
            keep_groups()
            return False
        watchdog.withdraw_departure()  # a last save may follow
        return True

    def leave(self, *, whole: bool = False) -> None:
        """Destroy the groups. Call this right after a barrier of all ranks: leaving early would make other ranks abort.

        A default group that the script has created is kept unless ``whole`` is set.
        """
        global _own_group
        current = dist.group.WORLD
        if current is None:
            return
        settle()
        if whole or current is _own_group:
            dist.destroy_process_group()
            _own_group = None
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
) -> RankGroup:
    """Create the process groups (none for a single process). A default group that the script has created is reused.

    Args:
        backend: name of a torch backend; default: the device's own (NCCL for GPUs), and gloo for CPU tensors.
        init_method: a rendezvous URL for torch (``tcp://``, ``file://``), used instead of the address in ``env``.
        timeout: timeout of the rendezvous, of the default group and of the script's collectives.

    Raises:
        RankEnvironmentError: the rendezvous failed.
        RuntimeMisuse: the backend is not available.
    """
    global _joins
    timeout = timeout or timedelta(seconds=TIMEOUT_SECONDS)
    if env.world_size == 1:
        return RankGroup(env, device, None, default=dist.group.WORLD, timeout=timeout)
    # Imported here: a single process does not need them.
    from hpcaccel.runtime.distributed.collectives.collective_watchdog import CollectiveWatchdog
    from hpcaccel.runtime.distributed.collectives.exchange import Exchange

    _joins += 1
    connect_on_demand(env.world_size)
    if dist.group.WORLD is None:
        _create_default_group(env, device, backend or device_backend.backend_name(device), init_method, timeout)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    # The watchdog must time out before gloo, whose error contains neither the call nor the missing ranks.
    calls = dist.new_group(backend="gloo", timeout=timeout + timedelta(seconds=GLOO_MARGIN_SECONDS))
    store = dist.PrefixStore(f"hpcaccel/{_joins}", dist.distributed_c10d._get_default_store())
    watchdog = CollectiveWatchdog(
        rank=env.rank, world_size=env.world_size, store=store, timeout_seconds=timeout.total_seconds()
    )
    group = RankGroup(
        env,
        device,
        control,
        calls,
        store,
        default=dist.group.WORLD,
        timeout=timeout,
        exchange=Exchange(calls, watchdog),
    )
    # Without this barrier a rank could end and close its sockets while others are still connecting to it.
    group.wait_for_all("the start of the training")
    return group


def initialise_alone(device: torch.device, timeout: timedelta) -> None:
    """Create a default group with only this process."""
    global _own_group
    store, backend = dist.HashStore(), device_backend.backend_name(device)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, **_device_id(device))
    _own_group = dist.group.WORLD


def _device_id(device: torch.device) -> dict[str, Any]:
    return {"device_id": device} if device.type == "cuda" else {}


def _create_default_group(
    env: RankEnvironment, device: torch.device, backend: str, init_method: str | None, timeout: timedelta
) -> None:
    """Run the rendezvous, then call ``init_process_group``. Its errors are raised as ``RankEnvironmentError``."""
    global _own_group
    from hpcaccel.runtime.distributed.rendezvous import base_store

    hook = sys.excepthook
    if device.type == "xla":
        xla_device.register_backend(env.world_size)
    _require_backend(backend, device)
    _export(env, with_address=init_method is None)
    store = dist.PrefixStore(f"group/{_joins}", base_store(env, init_method=init_method, timeout=timeout))
    try:
        dist.init_process_group(
            backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout, **_device_id(device)
        )
    except (RuntimeError, ValueError) as error:
        raise RankEnvironmentError(
            f"rank {env.rank} of {env.world_size} reached the other ranks at {env.master_addr}, but could not form the "
            f"{backend} group: {error}. Check that no firewall blocks ports between the nodes. "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (for RCCL, too) select the network interface"
        ) from error
    if _joins > 1:
        sys.excepthook = hook  # each init_process_group() adds another hook with its own prefix
    _own_group = dist.group.WORLD


def _export(env: RankEnvironment, *, with_address: bool) -> None:
    """Set those of torchrun's variables that are not set yet, for libraries that read them."""
    global _exported
    _exported = (os.getpid(), env)
    for name, value in env.variables.items():
        if with_address or not name.startswith("MASTER_"):
            os.environ.setdefault(name, value)


def known_environment() -> RankEnvironment | None:
    """The rank environment that this process has exported; None if there is none, as in forked processes."""
    return _exported[1] if _exported is not None and _exported[0] == os.getpid() else None


def _require_backend(backend: str, device: torch.device) -> None:
    for part in backend.split(","):
        name = part.rpartition(":")[2].lower()
        if not dist.is_backend_available(name) or (name == "nccl" and not torch.cuda.is_available()):
            raise RuntimeMisuse(
                f"backend={backend!r} (PartialState or InitProcessGroupKwargs): torch {torch.__version__} has no "
                f"backend {name!r} on this machine, and the device of this rank is {device}. Remove backend=: hpcaccel "
                "selects gloo or the device's own backend (NCCL, RCCL, xccl …)"
            )
