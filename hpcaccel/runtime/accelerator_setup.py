"""What one Accelerator was told. The process shares the ranks, the device, the precision and the strategy; how loaders
share out the data, how gradients accumulate and what torch's wrappers are given is each Accelerator's own."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import settings
from hpcaccel.runtime.configuration import OWN_HANDLERS
from hpcaccel.runtime.handlers import DataLoaderConfiguration
from hpcaccel.runtime.launch_env import asked_for, fsdp_plugin
from hpcaccel.runtime.settings import Settings
from hpcaccel.runtime.training.accumulation import Accumulation, MicroBatch
from hpcaccel.runtime.training_session import Session

if TYPE_CHECKING:
    import torch

    from hpcaccel.runtime.checkpointing.saver import Prepared
    from hpcaccel.runtime.training.scaling import Scaling

__all__ = ["Setup"]

_OF_LOADERS = tuple(field.name for field in fields(DataLoaderConfiguration))


class Setup:
    """The settings, handlers and accumulation of one Accelerator, and the session that it shares with the others.

    Args:
        handlers: kwargs handlers and plugins by name, None where none was given: see ``configuration``.
        given: settings by name; None was not given.

    Raises:
        RankEnvironmentError: the environment describes no usable group of ranks.
        RuntimeMisuse: a setting that is not allowed, or another value of one that the process shares.
    """

    dataloader_config: DataLoaderConfiguration
    """May be changed, or be another one: what is prepared from then on follows it."""
    handlers: SimpleNamespace
    accumulation: Accumulation

    def __init__(
        self, *, cpu: bool, project_dir: str | os.PathLike[str] | None, handlers: SimpleNamespace, given: dict[str, Any]
    ) -> None:
        self._told: dict[str, Any] = {"cpu": cpu, "project_dir": project_dir, "handlers": handlers, **given}
        self._session: Session | None = None
        self.begin()

    @property
    def session(self) -> Session:
        """What this process's Accelerators share."""
        if self._session is None:  # a copy, which has come from elsewhere
            self.begin()
            assert self._session is not None
        return self._session

    def begin(self) -> None:
        """Take part in the session of this process, which begins here if there is none."""
        self._read_environment()
        session = Session.current(**self._told)
        own = {name: value for name, value in self._told.items() if name in settings.OWN}
        shared = {name: getattr(session.settings, name) for name in settings.SHARED}
        self._fixed = replace(settings.load(session.place, **own), **shared)
        self.dataloader_config = DataLoaderConfiguration(**{name: getattr(self._fixed, name) for name in _OF_LOADERS})
        self.handlers = _merged(session.handlers, self._told["handlers"])
        self.accumulation = Accumulation(
            self._fixed.gradient_accumulation_steps,
            sync_with_dataloader=self._fixed.sync_with_dataloader,
            sync_each_batch=self._fixed.sync_each_batch or session.group.world_size == 1,
            adjust_scheduler=self._fixed.adjust_scheduler,
            loaders=session.in_use,
        )
        session.follow(self.accumulation)
        self._session = session

    def _read_environment(self) -> None:
        """Outside of a run, variables say what the script leaves open about FSDP."""
        if os.environ.get("HPCACCEL_RUN_DIR"):
            return
        handlers = self._told["handlers"]
        wanted = self._told.get("strategy") in (None, "fsdp") and asked_for().get("strategy") == "fsdp"
        handlers.fsdp = fsdp_plugin(handlers.fsdp, wanted=wanted)

    @property
    def settings(self) -> Settings:
        """What counts for what this Accelerator prepares now."""
        return replace(self._fixed, **{name: getattr(self.dataloader_config, name) for name in _OF_LOADERS})

    def begin_again(self) -> None:
        """After the end of a training: begin another one, as this Accelerator was told and set up. All ranks call."""
        loading, steps = self.dataloader_config, self.accumulation.steps
        self.begin()
        self.dataloader_config = loading
        self.accumulation.set_steps(steps)

    # -- copies --------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {"told": self._told}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy joins the ranks when it is used, and not before: it may have come to a loader's worker, which is no
        rank."""
        self._told = state["told"]
        self._session = None

    def __getattr__(self, name: str) -> Any:
        if name not in ("_fixed", "dataloader_config", "handlers", "accumulation") or "_told" not in self.__dict__:
            raise AttributeError(name)
        self.begin()
        return self.__dict__[name]

    @property
    def scaling(self) -> Scaling | None:
        return self.session.scaling

    @property
    def prepared(self) -> Prepared:
        return self.session.prepared

    def micro_batch(self, models: tuple[torch.nn.Module, ...]) -> MicroBatch:
        """The context of one micro-batch. Models that another Accelerator has prepared take that one's optimizers and
        schedulers along."""
        if self.session.accelerators == 1:
            return MicroBatch(self.accumulation, models)
        owners = self.session.owners
        others = {owner for model in models if (owner := owners.get(model, self.accumulation)) is not self.accumulation}
        return MicroBatch(self.accumulation, models, tuple(others))


def _merged(shared: SimpleNamespace, given: SimpleNamespace) -> SimpleNamespace:
    """
    Raises:
        RuntimeMisuse: another handler of something that the process shares.
    """
    merged = dict(vars(given))
    for name, has in vars(shared).items():
        if name in OWN_HANDLERS:
            continue
        wanted = merged[name]
        if wanted is not None and wanted != has and name not in ("fsdp", "init_process_group"):
            raise RuntimeMisuse(
                f"Accelerator() is given {wanted!r}, and the first Accelerator of this process "
                f"{'none' if has is None else repr(has)}: all Accelerators of a process share it. Give it to the first "
                "one, or call end_training() on that one before"
            )
        if wanted is None or name == "init_process_group":
            merged[name] = has
    return SimpleNamespace(**merged)
