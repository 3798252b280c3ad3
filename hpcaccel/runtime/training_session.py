"""Everything that all Accelerators of this process share: the group of ranks, the settings, the loop."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import settings
from hpcaccel.runtime.checkpointing.saver import Prepared
from hpcaccel.runtime.distributed import device_mesh as mesh
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.parallel import fp8
from hpcaccel.runtime.parallel.fsdp_outputs import ShardedModels
from hpcaccel.runtime.parallel.precision import make_scaler
from hpcaccel.runtime.prepare_registry import Known
from hpcaccel.runtime.training.accumulation import Accumulation, LoadersInUse
from hpcaccel.runtime.training.attempt_timing import Clock
from hpcaccel.runtime.training.determinism import make_deterministic, set_seed, share_threads
from hpcaccel.runtime.training.loop import Loop
from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer
from hpcaccel.runtime.training.scaling import Scaling
from hpcaccel.runtime.training.stop_agreement import StopFlag

if TYPE_CHECKING:
    from hpcaccel.runtime.health.heartbeat import Heartbeat

__all__ = ["Session"]

_current: Session | None = None


class Session:
    """From the first ``Accelerator()`` to ``end_training()``.

    Raises:
        RankEnvironmentError: the environment describes no usable group of ranks.
        RuntimeMisuse: a setting that is not allowed.
    """

    def __init__(
        self, *, cpu: bool, project_dir: str | os.PathLike[str] | None, handlers: SimpleNamespace, **given: Any
    ) -> None:
        begun = time.time()
        place = settings.locate(project_dir)
        self.place = place
        self.settings = settings.load(place, **given)
        self.handlers = handlers
        """Kwargs handlers and plugins by name, None where none was given: see ``configuration``."""
        flag = StopFlag()
        if self.settings.stop == "cooperative":
            flag.install()
        if self.settings.deterministic:
            make_deterministic()
        self._heartbeat = _start_heartbeat(place)
        wanted = handlers.init_process_group
        self.world = World.current(
            cpu=cpu,
            backend=None if wanted is None else wanted.backend,
            init_method=None if wanted is None else wanted.init_method,
            timeout=(wanted and wanted.timeout) or _timeout(self.settings.timeout_seconds),
        )
        formed = time.time()
        self.world.has_session = True
        if self.settings.strategy == "fsdp":
            self.world.form_group_of_one()
        self.group = self.world.group
        self.world.debug |= self.settings.debug
        if self.group.exchange is not None:
            self.group.exchange.rollcall.control_timeout_seconds = self.settings.control_timeout_seconds
        ranks = self.group.env
        self.layout = mesh.arrange(ranks.world_size, ranks.local_world_size, self.settings, handlers)
        if self.layout.tensor > 1:
            self.group = replace(self.group, tensor_size=self.layout.tensor)
        device = self.group.device
        share_threads(self.group.env.local_world_size)
        if self.settings.seed is not None:
            set_seed(self.settings.seed)
        if self.settings.mixed_precision == "fp8":
            fp8.check(device, handlers.fp8)
        self.scaler: torch.amp.GradScaler | None = make_scaler(
            device,
            self.settings.mixed_precision,
            handlers.scaler,
            sharded=self.settings.strategy == "fsdp" or self.layout.tensor > 1,
        )
        self.scaling = None if self.scaler is None else Scaling(self.scaler)
        self.in_use = LoadersInUse()
        self.accumulation = Accumulation(1, loaders=self.in_use)
        """Of the newest Accelerator, which ``GradientState()`` shows."""
        self.accelerators = 0
        self.owners: Any = WeakIdKeyDictionary()
        """The accumulation that each prepared model's optimizers follow."""
        self.prepared = Prepared(scaler=self.scaler, mesh={"strategy": self.settings.strategy, **self.layout._asdict()})
        self.faces: list[PreparedOptimizer] = []
        self.known = Known()
        self.sharded = ShardedModels()
        self.shards = WeakIdKeyDictionary()
        """What whole parameters became when their model was sharded. Holds on to none of the whole ones."""
        self.distributed_type: Any = None
        """What the script says that it is; None: what it is."""
        self.has_ended = False
        self.was_reset = False
        """Whether ``AcceleratorState._reset_state()`` has made this process forget it."""
        self.trackers: list[Any] = []
        self.tracking: Any = None
        """What ``log_with`` asked for, see ``tracking.hub``; None where nothing was."""
        self.loop = Loop(
            place=place,
            group=self.group,
            settings=self.settings,
            prepared=self.prepared,
            accumulation=self.accumulation,
            in_use=self.in_use,
            flag=flag,
            clock=Clock(place.run if self.group.is_main else None, place.attempt, begun=begun, formed=formed),
        )
        if self._heartbeat is not None:
            self._heartbeat.loop = self.loop

    @cached_property
    def mesh(self) -> DeviceMesh:
        """How the ranks are arranged. All of them must ask for the first time together."""
        self.world.form_group_of_one()
        # What tensor parallel has shared is replicated by FSDP2 too, with one rank a shard: DDP does not know DTensors.
        sharded = self.settings.strategy == "fsdp" or self.layout.tensor > 1
        return mesh.build(self.layout, self.group.device, sharded=sharded)

    @classmethod
    def existing(cls) -> Session | None:
        return _current

    @classmethod
    def current(cls, **given: Any) -> Session:
        """The session of this process, made if there is none.

        Raises:
            RuntimeMisuse: it exists and has another value of something that is given again.
        """
        global _current
        if _current is not None and not _current.group.is_alive:
            _current.abandon()  # the script has destroyed the group behind its back
        if _current is None:
            _current = cls(**given)
        else:
            _current.refuse_changes(given)
        return _current

    def follow(self, accumulation: Accumulation) -> None:
        """An Accelerator has been made, with this accumulation."""
        self.accelerators += 1
        self.accumulation = self.loop.accumulation = accumulation

    def refuse_changes(self, given: dict[str, Any]) -> None:
        """What all Accelerators of a process share cannot be another for one of them.

        Raises:
            RuntimeMisuse: it would be.
        """
        wanted = getattr(given.get("handlers"), "init_process_group", None)
        self.world.refuse_changes(
            cpu=bool(given.get("cpu")),
            backend=None if wanted is None else wanted.backend,
            timeout=None if wanted is None else wanted.timeout,
        )
        self.world.debug |= bool(given.get("debug"))
        for name in settings.SHARED.intersection(given) - {"debug"}:
            value, has = given[name], getattr(self.settings, name)
            if value is not None and has != value:
                raise RuntimeMisuse(
                    f"Accelerator({name}={value!r}): this process has an Accelerator with {name}={has!r} already. "
                    "Call end_training() on it first"
                )

    def forget(self) -> None:
        for items in (
            self.prepared.models,
            self.prepared.optimizers,
            self.prepared.schedulers,
            self.prepared.loaders,
            self.prepared.registered,
            self.faces,
        ):
            items.clear()
        self.known.clear()
        self.shards.clear()
        self.owners.clear()
        self.sharded.clear()

    def end(self, *, destroy: bool = False) -> None:
        """All ranks together: the outcome is written, the group left; with ``destroy`` also one that the script has
        formed by itself."""
        global _current
        if _current is self:
            _current = None
            self.has_ended = True
            self.loop.end()
            self._show_no_loop()
            if destroy:
                self.group.leave(whole=True)
            self.world.forget()

    def abandon(self) -> None:
        """This rank alone: as if this session had never been. The group of ranks stays as it is."""
        global _current
        self.has_ended = True
        if _current is self:
            _current = None
            self.world.has_session = False
            self.loop.abandon()
            self._show_no_loop()

    def _show_no_loop(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.loop = None


def _start_heartbeat(place: settings.Place) -> Heartbeat | None:
    """Only a supervisor's ranks have somebody who listens."""
    if place.run is None:
        return None
    from hpcaccel.runtime.health.heartbeat import start_heartbeat

    return start_heartbeat(place.run, place.attempt)


def _timeout(seconds: float) -> timedelta | None:
    """None where nobody has said anything."""
    return None if seconds == settings.Settings.timeout_seconds else timedelta(seconds=seconds)


def _followed() -> tuple[Accumulation, Scaling | None]:
    """What an optimizer follows that was prepared in another process."""
    session = Session.existing()
    return (Accumulation(1), None) if session is None else (session.accumulation, session.scaling)


PreparedOptimizer._of_this_process = _followed
