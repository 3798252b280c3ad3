"""``Setup``: settings, handlers and gradient accumulation of one Accelerator, and its session.

All Accelerators of a process share ranks, device, precision and strategy. Each has its own loader configuration,
gradient accumulation and arguments for torch's wrappers."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import settings
from hpcaccel.runtime.configuration import OWN_HANDLERS
from hpcaccel.runtime.handlers import AORecipeKwargs, DataLoaderConfiguration
from hpcaccel.runtime.launch_env import dynamo_plugin, fsdp_plugin, parallelism_config, settings_from_env
from hpcaccel.runtime.parallel.precision import COMPUTE_DTYPES
from hpcaccel.runtime.parallelism_config import shards_model
from hpcaccel.runtime.settings import Settings
from hpcaccel.runtime.training.accumulation import Accumulation, MicroBatch
from hpcaccel.runtime.training_session import TrainingSession

if TYPE_CHECKING:
    import torch

    from hpcaccel.runtime.checkpointing.prepared_objects import PreparedObjects
    from hpcaccel.runtime.training.scaling import Scaling

__all__ = ["Setup"]

_OF_LOADERS = tuple(field.name for field in fields(DataLoaderConfiguration))


class Setup:
    """The settings, handlers and accumulation of one Accelerator, and the session that it shares with the others.

    Args:
        handlers: kwargs handlers and plugins by name, each None if not given (see ``configuration``).
        given: settings by name, each None if not given.

    Raises:
        RankEnvironmentError: the environment describes no usable group of ranks.
        RuntimeMisuse: a value is not allowed, or differs from the value that all Accelerators of the process share.
    """

    dataloader_config: DataLoaderConfiguration
    """Configuration of loaders that are prepared later. A script may change or replace it."""
    handlers: SimpleNamespace
    accumulation: Accumulation
    session: TrainingSession
    """The session that all Accelerators of this process share. A plain attribute, because each step reads it twice."""
    native_amp_override: bool | None = None
    """The value of ``native_amp`` that the script has set; None if it has set none."""

    def __init__(
        self, handlers: SimpleNamespace, given: dict[str, Any], *, cpu: bool, project_dir: str | os.PathLike[str] | None
    ) -> None:
        self._arguments: dict[str, Any] = {"cpu": cpu, "project_dir": project_dir, "handlers": handlers, **given}
        self.begin()

    def begin(self) -> None:
        """Join the session of this process; start a session if there is none."""
        self._read_environment()
        self._choose_deepspeed()
        session = TrainingSession.current(**self._arguments)
        own = {name: value for name, value in self._arguments.items() if name in settings.OWN}
        shared = {name: getattr(session.settings, name) for name in settings.SHARED}
        self._fixed = replace(settings.load(session.place, **own), **shared)
        self.dataloader_config = DataLoaderConfiguration(**{name: getattr(self._fixed, name) for name in _OF_LOADERS})
        self.handlers = _merged(session.handlers, self._arguments["handlers"])
        if self._fixed.mixed_precision == "fp8" and self._fixed.strategy != "deepspeed" and self.handlers.fp8 is None:
            self.handlers.fp8 = AORecipeKwargs()
        self.accumulation = Accumulation(
            self._fixed.gradient_accumulation_steps,
            sync_with_dataloader=self._fixed.sync_with_dataloader,
            sync_each_batch=self._fixed.sync_each_batch or session.group.world_size == 1,
            adjust_scheduler=self._fixed.adjust_scheduler,
            loaders=session.in_use,
        )
        session.follow(self.accumulation)
        self.session = session

    def _read_environment(self) -> None:
        """Outside a run, read from environment variables those settings of plugins that the script does not give."""
        if os.environ.get("HPCACCEL_RUN_DIR"):
            return
        arguments, handlers = self._arguments, self._arguments["handlers"]
        if handlers.parallelism is None:
            handlers.parallelism = parallelism_config()
            if arguments.get("strategy") is None and "strategy" not in settings_from_env():
                arguments["strategy"] = "fsdp" if shards_model(handlers.parallelism) else None
        wanted = arguments.get("strategy") in (None, "fsdp") and settings_from_env().get("strategy") == "fsdp"
        handlers.fsdp = fsdp_plugin(handlers.fsdp, wanted=wanted)
        handlers.dynamo = dynamo_plugin() if handlers.dynamo is None else handlers.dynamo

    def _choose_deepspeed(self) -> None:
        """With strategy ``deepspeed``, make the script's plugin ready, or create one from the spec or the environment.

        Raises:
            RuntimeMisuse: a value of the plugin is not allowed, or its precision is not the script's.
        """
        arguments, handlers = self._arguments, self._arguments["handlers"]
        if handlers.deepspeed is None and TrainingSession.existing() is not None:
            return  # that of the first Accelerator
        names = ("strategy", "mixed_precision")
        found = settings.load(
            settings.locate(arguments["project_dir"]), **{name: arguments.get(name) for name in names}
        )
        if found.strategy != "deepspeed":
            return
        from hpcaccel.runtime.deepspeed.plugin_choice import choose_plugin

        handlers.deepspeed, arguments["mixed_precision"] = choose_plugin(handlers, found)

    @property
    def native_amp(self) -> bool:
        """Whether prepared models compute under ``torch.autocast``. DeepSpeed's engine converts the weights instead."""
        if self.native_amp_override is not None:
            return self.native_amp_override
        return self._fixed.mixed_precision in COMPUTE_DTYPES and self._fixed.strategy != "deepspeed"

    def replace_handler(self, name: str, handler: Any) -> None:
        """Use ``handler`` from now on, also after the current training.

        Args:
            name: one of ``OWN_HANDLERS``.
        """
        for handlers in (self.handlers, self._arguments["handlers"]):
            setattr(handlers, name, handler)

    @property
    def settings(self) -> Settings:
        """The current settings for objects that this Accelerator prepares."""
        return replace(self._fixed, **{name: getattr(self.dataloader_config, name) for name in _OF_LOADERS})

    def begin_again(self) -> None:
        """After a training has ended, start another training with the same settings. All ranks call this."""
        loading, steps = self.dataloader_config, self.accumulation.steps
        self.begin()
        self.dataloader_config = loading
        self.accumulation.set_steps(steps)

    # -- copies --------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": self._arguments, "native_amp_override": self.native_amp_override}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy. The copy joins the ranks only when it is first used: it may be in a worker, which is not a
        rank."""
        self.__class__ = _UnjoinedSetup
        self._arguments = state["arguments"]
        self.native_amp_override = state["native_amp_override"]

    @property
    def scaling(self) -> Scaling | None:
        return self.session.scaling

    @property
    def prepared(self) -> PreparedObjects:
        return self.session.prepared

    def micro_batch(self, models: tuple[torch.nn.Module, ...]) -> MicroBatch:
        """The context of one micro-batch of ``models``.

        If other Accelerators have prepared some of these models, the context also applies to the optimizers and
        schedulers of those Accelerators.
        """
        if self.session.accelerators == 1:
            return MicroBatch(self.accumulation, models)
        owners = self.session.owners
        others = {owner for model in models if (owner := owners.get(model, self.accumulation)) is not self.accumulation}
        return MicroBatch(self.accumulation, models, tuple(others))


class _UnjoinedSetup(Setup):
    """A copy that has not joined the ranks. A class of its own, because ``__getattr__`` makes each read slower."""

    def __getattr__(self, name: str) -> Any:
        lazy = ("_fixed", "dataloader_config", "handlers", "accumulation", "session")
        if name not in lazy or "_arguments" not in self.__dict__:
            raise AttributeError(name)
        self.begin()
        return self.__dict__[name]

    def begin(self) -> None:
        self.__class__ = Setup  # type: ignore[assignment]
        self.begin()


def _merged(shared: SimpleNamespace, given: SimpleNamespace) -> SimpleNamespace:
    """The handlers of one Accelerator: shared handlers from the session, other handlers as given. An FSDP plugin that
    is given replaces the session's.

    Raises:
        RuntimeMisuse: a given handler for fp8, fp16 scaling or parallelism differs from the session's.
    """
    merged = dict(vars(given))
    for name, has in vars(shared).items():
        if name in OWN_HANDLERS:
            continue
        wanted = merged[name]
        if wanted is not None and wanted != has and name not in ("fsdp", "init_process_group"):
            raise RuntimeMisuse(
                f"Accelerator() got {wanted!r}, but the first Accelerator of this process got "
                f"{'none' if has is None else repr(has)}. All Accelerators of a process share this setting: pass it to "
                "the first one, or call end_training() on the first one before creating another"
            )
        if wanted is None or name == "init_process_group":
            merged[name] = has
    return SimpleNamespace(**merged)
