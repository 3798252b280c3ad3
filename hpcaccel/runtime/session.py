"""Everything that all Accelerators of this process share: the group of ranks, the settings, the loop."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import settings
from hpcaccel.runtime.accumulation import Accumulation
from hpcaccel.runtime.determinism import make_deterministic, set_seed, share_threads
from hpcaccel.runtime.loop import Loop
from hpcaccel.runtime.optim import PreparedOptimizer
from hpcaccel.runtime.precision import make_scaler
from hpcaccel.runtime.saving import Prepared
from hpcaccel.runtime.stop import StopFlag
from hpcaccel.runtime.world import World

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
        wanted = handlers.init_process_group
        self.world = World.current(
            cpu=cpu,
            backend=None if wanted is None else wanted.backend,
            timeout=(wanted and wanted.timeout) or timedelta(seconds=self.settings.timeout_seconds),
        )
        if self.settings.strategy == "fsdp":
            self.world.form_group_of_one()
        self.group = self.world.group
        device = self.group.device
        share_threads(self.group.env.local_world_size)
        if self.settings.seed is not None:
            set_seed(self.settings.seed)
        self.scaler: torch.amp.GradScaler | None = make_scaler(device, self.settings.mixed_precision)
        self.accumulation = Accumulation(self.settings.gradient_accumulation_steps)
        self.prepared = Prepared(scaler=self.scaler)
        self.faces: list[PreparedOptimizer] = []
        self.shards: dict[Any, Any] = {}
        """What whole parameters became when their model was sharded."""
        self.trackers: list[Any] = []
        self.save_hooks: dict[int, Any] = {}
        self.load_hooks: dict[int, Any] = {}
        self.loop = Loop(
            place=place,
            group=self.group,
            settings=self.settings,
            prepared=self.prepared,
            accumulation=self.accumulation,
            flag=flag,
        )

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
        if _current is None:
            _current = cls(**given)
        else:
            _current.refuse_changes(given)
        return _current

    def refuse_changes(self, given: dict[str, Any]) -> None:
        """Accumulation may be another for another loop; the precision or the strategy may not."""
        if given.get("gradient_accumulation_steps") is not None:
            self.accumulation.steps = given.pop("gradient_accumulation_steps")
        for name, value in given.items():
            has = getattr(self.settings, name, value)
            if value is not None and has != value:
                raise RuntimeMisuse(
                    f"Accelerator({name}={value!r}): this process has an Accelerator with {name}={has!r} already. "
                    "Call end_training() on it first"
                )

    def register(self, objects: Iterable[Any]) -> None:
        """
        Raises:
            RuntimeMisuse: an object without ``state_dict`` and ``load_state_dict``.
        """
        objects = list(objects)
        for item in objects:
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise RuntimeMisuse(f"{item!r} cannot be saved: it needs state_dict() and load_state_dict()")
        self.prepared.registered += objects

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
        self.shards.clear()

    def end(self) -> None:
        global _current
        if _current is self:
            _current = None
            self.loop.end()
            self.world.forget()
