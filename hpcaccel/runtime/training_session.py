"""``TrainingSession``: the ranks, settings, prepared objects and loop that all Accelerators of a process share."""

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
from hpcaccel.runtime.checkpointing.prepared_objects import PreparedObjects
from hpcaccel.runtime.data.loaders_in_use import LoadersInUse
from hpcaccel.runtime.distributed import device_mesh as mesh
from hpcaccel.runtime.distributed.mesh_layout import arrange
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.enums import DistributedType, of_strategy
from hpcaccel.runtime.parallel.fsdp_outputs import ShardedModels
from hpcaccel.runtime.parallel.precision import refuse_fp8
from hpcaccel.runtime.rank_logger import configure_training_log
from hpcaccel.runtime.rng.determinism import make_deterministic, set_seed, share_threads
from hpcaccel.runtime.stop_flag import StopFlag
from hpcaccel.runtime.training.accumulation import Accumulation
from hpcaccel.runtime.training.attempt_timing import AttemptClock
from hpcaccel.runtime.training.loop import Loop
from hpcaccel.runtime.training.loop_context import LoopActivity, LoopContext
from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer
from hpcaccel.runtime.training.scaling import Scaling, make_scaler

if TYPE_CHECKING:
    from hpcaccel.runtime.deepspeed.engine_wrappers import DeepSpeedEngineWrapper
    from hpcaccel.runtime.health.heartbeat import Heartbeat

__all__ = ["PrepareRegistry", "TrainingSession"]

_current: TrainingSession | None = None


class PrepareRegistry:
    """Records the prepared objects of one session and their originals, so that no object is prepared twice."""

    def __init__(self) -> None:
        self._prepared: dict[int, Any] = {}
        self._originals: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def add(self, original: Any, prepared: Any, owner: Any = None) -> None:
        """Record that ``original`` was prepared as ``prepared``; several originals may have one prepared object.

        Args:
            owner: the only Accelerator that this is recorded for; other Accelerators may prepare the original again.
        """
        self._prepared[id(prepared)] = prepared
        if original is not prepared:
            self._originals[id(original), id(owner)] = (original, prepared, owner)

    def has(self, item: Any) -> bool:
        """Whether ``prepare`` has returned ``item``."""
        return id(item) in self._prepared

    def refuse_original(self, item: Any, owner: Any = None) -> None:
        """Raise RuntimeMisuse if ``item`` has already been prepared."""
        if (id(item), id(owner)) in self._originals:
            raise RuntimeMisuse(
                f"this {type(item).__name__} has already been prepared, and prepare() returned another object for it. "
                "Use the returned object, as in `model = accelerator.prepare(model)`. To prepare the original again, "
                "call accelerator.free_memory() first"
            )

    def clear(self) -> None:
        self._prepared.clear()
        self._originals.clear()


class TrainingSession:
    """This process's training, from the first ``Accelerator()`` to ``end_training()``.

    Args:
        cpu: whether to train on the CPU even if there are GPUs.
        handlers: kwargs handlers and plugins by name, each None if not given (see ``configuration``).
        given: the script's settings by name.

    Raises:
        RankEnvironmentError: the environment describes no usable group of ranks.
        RuntimeMisuse: a setting's value is not allowed, or does not fit the device or the number of ranks.
    """

    def __init__(
        self, *, cpu: bool, project_dir: str | os.PathLike[str] | None, handlers: SimpleNamespace, **given: Any
    ) -> None:
        started = time.time()
        self.place = settings.locate(project_dir)
        self.settings = settings.load(self.place, **given)
        self.handlers = handlers
        flag = StopFlag()
        if self.settings.stop == "cooperative":
            flag.install()
        if self.settings.deterministic:
            make_deterministic()
        self._heartbeat = _start_heartbeat(self.place)
        self.world = self._join_ranks(cpu=cpu)
        formed = time.time()
        self.group = self.world.group
        configure_training_log((ranks := self.group.env).rank)
        self.layout = arrange(ranks.world_size, ranks.local_world_size, self.settings, handlers)
        if self.layout.per_batch > 1:
            self.group = replace(self.group, ranks_per_batch=self.layout.per_batch)
        share_threads(ranks.local_world_size)
        if self.settings.seed is not None:
            set_seed(self.settings.seed)
        self.scaler = self._make_scaler()
        self.scaling = None if self.scaler is None else Scaling(self.scaler)
        self.in_use = LoadersInUse()
        self.accumulation = Accumulation(1, loaders=self.in_use)
        """The newest Accelerator's accumulation. ``GradientState()`` uses it."""
        self.accelerators = 0
        self.registry = PrepareRegistry()
        sizes = self.layout._asdict()
        self.prepared = PreparedObjects(scaler=self.scaler, mesh={"strategy": self.settings.strategy, **sizes})
        self.optimizers: list[PreparedOptimizer] = []
        self.owners: Any = WeakIdKeyDictionary()
        """For each prepared model, the accumulation of the Accelerator that prepared it."""
        self.sharded = ShardedModels()
        self.shards = WeakIdKeyDictionary()
        """For each original parameter, the sharded parameter that replaces it."""
        self.engine: DeepSpeedEngineWrapper | None = None
        """DeepSpeed's engine, which then takes the steps; None with other strategies, and before ``prepare``."""
        self.distributed_type_override: DistributedType | None = None
        """The distributed type that the script has set in ``AcceleratorState``; None if it has set none."""
        self.has_ended = self.was_reset = False
        self.trackers: list[Any] = []
        self.tracking: Any = None
        """The ``tracking.hub.Tracking`` of ``log_with``; None if no tracker was selected."""
        self.loop = self._make_loop(flag, started=started, formed=formed)

    def _join_ranks(self, *, cpu: bool) -> World:
        """Find the other ranks and form the group."""
        wanted, seconds = self.handlers.init_process_group, self.settings.timeout_seconds
        is_default = seconds == settings.Settings.timeout_seconds
        world = World.current(
            cpu=cpu,
            backend=None if wanted is None else wanted.backend,
            init_method=None if wanted is None else wanted.init_method,
            timeout=(wanted and wanted.timeout) or (None if is_default else timedelta(seconds=seconds)),
        )
        world.has_session = True
        if self.settings.strategy != "ddp":
            world.form_group_of_one()
        world.debug |= self.settings.debug
        if world.group.exchange is not None:
            world.group.exchange.watchdog.control_timeout_seconds = self.settings.control_timeout_seconds
        return world

    def _make_scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of fp16; None for other precisions, and for DeepSpeed.

        Raises:
            RuntimeMisuse: fp8 is set, but the device or the handler does not support it, or torchao is missing.
        """
        if self.settings.strategy == "deepspeed":
            return None  # its engine has its own
        device, precision = self.group.device, self.settings.mixed_precision
        if precision == "fp8":
            refuse_fp8(device, self.handlers.fp8)
        is_sharded = self.settings.strategy == "fsdp" or self.layout.tensor > 1
        return make_scaler(device, precision, self.handlers.scaler, sharded=is_sharded)

    def _make_loop(self, flag: StopFlag, *, started: float, formed: float) -> Loop:
        place, run = self.place, self.place.run if self.group.is_main else None
        group, prepared, in_use = self.group, self.prepared, self.in_use
        clock = AttemptClock(run, place.attempt, begun=started, formed=formed, waited_for_data=in_use.waited_seconds)
        context = LoopContext.create(
            place, group, self.settings, prepared=prepared, in_use=in_use, flag=flag, clock=clock
        )
        loop = Loop(context, self.accumulation)
        if self._heartbeat is not None:
            self._heartbeat.source = LoopActivity(context, lambda: loop.evaluates)
        return loop

    @property
    def distributed_type(self) -> DistributedType:
        """FSDP or DEEPSPEED for these strategies, else that of the ranks; or the value that the script has set."""
        return self.distributed_type_override or of_strategy(self.settings.strategy, self.world.distributed_type)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh of ranks. The first read is a collective call of all ranks."""
        self.world.form_group_of_one()
        # With tensor parallelism, FSDP2 with one rank per shard replaces DDP, which does not support DTensors.
        sharded = self.settings.strategy == "fsdp" or self.layout.tensor > 1
        return mesh.build(self.layout, self.group.device, sharded=sharded, config=self.handlers.parallelism)

    @cached_property
    def model_mesh(self) -> DeviceMesh:
        """The mesh over which models are sharded. The first read is a collective call of all ranks."""
        return mesh.model_mesh(self.layout, self.mesh)

    @classmethod
    def existing(cls) -> TrainingSession | None:
        return _current

    @classmethod
    def current(cls, **given: Any) -> TrainingSession:
        """The session of this process. If there is none, a session is created.

        Raises:
            RuntimeMisuse: a given setting has another value in the existing session.
        """
        global _current
        if _current is not None and not _current.group.is_alive:
            _current.abandon()  # the script has destroyed the group itself
        if _current is None:
            _current = cls(**given)
        else:
            _current.refuse_changes(given)
        return _current

    def follow(self, accumulation: Accumulation) -> None:
        """Count a new Accelerator, and use its accumulation from now on."""
        self.accelerators += 1
        self.accumulation = self.loop.accumulation = accumulation
        PreparedOptimizer.follow_in_copies(accumulation, self.scaling)

    def refuse_changes(self, given: dict[str, Any]) -> None:
        """Refuse given settings that differ from those that all Accelerators share. ``debug`` may be enabled later.

        Raises:
            RuntimeMisuse: a given setting differs from the shared one.
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
                    f"Accelerator({name}={value!r}): this process already has an Accelerator with {name}={has!r}. "
                    "Call end_training() on it first"
                )

    def forget(self) -> None:
        """Drop all references to prepared objects."""
        if self.engine is not None:
            self.engine.engine.destroy()
            self.engine = self.prepared.attached = None
        prepared = self.prepared
        lists = (prepared.models, prepared.optimizers, prepared.schedulers, prepared.loaders, prepared.registered)
        everything: tuple[Any, ...] = (*lists, self.optimizers, self.registry, self.shards, self.owners, self.sharded)
        for items in everything:
            items.clear()

    def end(self, *, destroy: bool = False) -> None:
        """End the training on all ranks: write the outcome and leave the group.

        Args:
            destroy: whether to also destroy a default process group that the script has created.
        """
        global _current
        if _current is self:
            _current = None
            self.has_ended = True
            self.loop.end()
            self._detach()
            if destroy:
                self.group.leave(whole=True)
            self.world.forget()

    def abandon(self) -> None:
        """Drop the session on this rank only. Nothing is saved, and the process group remains."""
        global _current
        self.has_ended = True
        if _current is self:
            _current = None
            self.world.has_session = False
            self.loop.abandon()
            self._detach()

    def _detach(self) -> None:
        PreparedOptimizer.follow_in_copies(None)
        if self._heartbeat is not None:
            self._heartbeat.source = None


def _start_heartbeat(place: settings.OutputLocation) -> Heartbeat | None:
    """Start the heartbeat. Only ranks of a run have one, because a supervisor reads it; outside a run, returns None."""
    if place.run is None:
        return None
    from hpcaccel.runtime.health.heartbeat import start_heartbeat

    return start_heartbeat(place.run, place.attempt)
