"""The states that scripts ask beside the Accelerator: views, made as often as one likes, of the one world of ranks and
the one session of this process. After the end they show where the process stood, until something new begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.compat.unsupported_attributes import lacks
from hpcaccel.runtime.distributed.process_info import Standing, distributed_type
from hpcaccel.runtime.distributed.rank_env import is_set
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.enums import DistributedType
from hpcaccel.runtime.training.accumulation import Accumulation
from hpcaccel.runtime.training_session import Session

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hpcaccel.runtime.handlers import GradientAccumulationPlugin

__all__ = ["AcceleratorState", "GradientState", "PartialState", "is_initialized"]


def is_initialized() -> bool:
    """Whether this process has an Accelerator that has not ended."""
    return Session.existing() is not None


class _Shared:
    """What scripts look at to see whether there is a state already: empty, or not."""

    def __get__(self, instance: Any, owner: Any) -> dict[str, Any]:
        found: dict[str, Any] = owner._what_is_shared()
        return found


@lacks("fork_launched")
class PartialState(Standing):
    """Where this process stands among the ranks. Needs no Accelerator, and shares the ranks with the one there is.

    Args:
        cpu: leave GPUs alone.
        kwargs: ``backend``, ``init_method`` and ``timeout`` as in ``InitProcessGroupKwargs``. They count where the
            ranks have not formed their group yet.

    Raises:
        RankEnvironmentError: the environment describes no usable group of ranks, or they do not find each other.
        RuntimeMisuse: a keyword that is none of these.
    """

    _shared_state: ClassVar[_Shared] = _Shared()
    _last: ClassVar[World | None] = None

    def __init__(
        self,
        cpu: bool = False,
        *,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in kwargs.items():
            raise RuntimeMisuse(
                f"PartialState({name}={value!r}): there is no such keyword. "
                "Known are: cpu, backend, init_method, timeout"
            )
        PartialState._last = World.current(cpu=cpu, backend=backend, init_method=init_method, timeout=timeout)

    @property
    def _world(self) -> World:
        world = World.existing() or PartialState._last
        if world is None:
            raise AttributeError("PartialState has been reset: make another one with PartialState()")
        return world

    @classmethod
    def _what_is_shared(cls) -> dict[str, Any]:
        if World.existing() is None:
            return {}
        state = cls.__new__(cls)
        return {name: getattr(state, name) for name in _SHOWN}

    @staticmethod
    def _reset_state() -> None:
        """Forget the ranks; the group stays, and the next state finds it."""
        PartialState._last = None
        world = World.existing()
        if world is not None:
            world.forget()

    @property
    def initialized(self) -> bool:
        return World.existing() is not None

    @property
    def backend(self) -> str | None:
        """How tensors on the device travel: ``nccl`` or ``gloo``; None where this process is alone."""
        return self._world.backend if self.use_distributed else None

    @property
    def debug(self) -> bool:
        """Whether shapes are compared before all collectives, those of GPU tensors too. May be set."""
        return self._world.debug

    @debug.setter
    def debug(self, value: bool) -> None:
        self._world.debug = value

    @property
    def fork_launched(self) -> bool:
        """Whether a launcher of this program has forked this process."""
        return is_set("FORK_LAUNCHED")

    @property
    def default_device(self) -> torch.device:
        """The kind of device that this machine has."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def set_device(self) -> None:
        """Make this process's GPU the one that torch takes where none is named."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def gather(self, value: Any) -> Any:
        """All processes' tensors concatenated, lists of strings or other objects joined, in order, on every process.

        Raises:
            RuntimeMisuse: types, shapes or containers differ among the processes, or some do not come.
        """
        from hpcaccel.runtime.distributed.collectives.gather_for_metrics import gather_samples

        self._world.group.refuse_if_left()
        return gather_samples(value, self._world.group, samples=None, valid=None)

    def gather_for_metrics(self, value: Any) -> Any:
        """As ``gather``, without what the last ``split_between_processes(..., apply_padding=True)`` repeated.

        That concerns what has as many entries as each process's part; anything else, say a statistic, stays whole.
        """
        from hpcaccel.runtime.distributed.collectives.gather_for_metrics import gather_samples

        split = self._world.split
        if split is None or not split.padded:
            return self.gather(value)
        self._world.group.refuse_if_left()
        return gather_samples(value, self._world.group, samples=split.longest, valid=split.real(self.process_index))

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


_SHOWN = ("backend", "debug", "device", "distributed_type", "local_process_index", "num_processes", "process_index")


@lacks("deepspeed_plugins get_deepspeed_plugin select_deepspeed_plugin")
class AcceleratorState(PartialState):
    """What the Accelerator of this process was told, and where the process stands.

    Raises:
        RuntimeMisuse: there has been no Accelerator yet; or it has another precision than is asked for.
    """

    _last_session: ClassVar[Callable[[], Session | None]] = lambda: None
    """Weak: an Accelerator that nobody has any more takes its models along."""

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        *,
        _session: Session | None = None,
    ) -> None:
        self._own = _session
        found = _session or Session.existing() or AcceleratorState._last_session()
        if found is None:
            raise RuntimeMisuse(
                "AcceleratorState() before Accelerator(): make an Accelerator first, which has the state"
            )
        AcceleratorState._last_session = weakref.ref(found)
        given = {"mixed_precision": None if mixed_precision is None else str(mixed_precision).lower()}
        found.refuse_changes({**given, "cpu": cpu})

    @property
    def _session(self) -> Session:
        session = self._own or Session.existing() or AcceleratorState._last_session()
        if session is None:
            raise AttributeError("AcceleratorState has been reset: make another Accelerator()")
        return session

    @property
    def _world(self) -> World:
        return self._session.world

    @classmethod
    def _what_is_shared(cls) -> dict[str, Any]:
        session = Session.existing()
        return (
            {}
            if session is None
            else {**PartialState._shared_state, "mixed_precision": session.settings.mixed_precision}
        )

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """This process alone: forget the Accelerator, so that the next one may be told something else. The group of
        ranks stays as it is."""
        AcceleratorState._last_session = lambda: None
        session = Session.existing()
        if session is not None:
            session.was_reset = True
            session.abandon()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def initialized(self) -> bool:
        return Session.existing() is not None

    @property
    def distributed_type(self) -> DistributedType:
        """NO, MULTI_CPU or MULTI_GPU; FSDP where models are sharded. A script may say something else: its own
        decisions follow that, and nothing else does."""
        return distributed_type(self._world, self._session)

    @distributed_type.setter
    def distributed_type(self, value: DistributedType) -> None:
        real = distributed_type(self._world, None)
        real = DistributedType.FSDP if self.is_fsdp2 else real
        self._session.distributed_type = None if value == real else DistributedType(value)

    @property
    def mixed_precision(self) -> str:
        return self._session.settings.mixed_precision

    @property
    def is_fsdp2(self) -> bool:
        return self._session.settings.strategy == "fsdp"

    @property
    def fsdp_plugin(self) -> Any:
        return self._session.handlers.fsdp

    @property
    def dynamo_plugin(self) -> Any:
        return self._session.handlers.dynamo

    @property
    def torch_tp_plugin(self) -> Any:
        return self._session.handlers.tensor_parallel

    @property
    def parallelism_config(self) -> Any:
        return self._session.handlers.parallelism

    @property
    def device_mesh(self) -> DeviceMesh:
        """How the ranks are arranged. All of them must ask for the first time together."""
        return self._session.mesh

    @property
    def deepspeed_plugin(self) -> None:
        """DeepSpeed is not here: None, as in Accelerate without it."""
        return None

    @property
    def megatron_lm_plugin(self) -> None:
        """Megatron-LM is not here: None, as in Accelerate without it."""
        return None

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


Standing._of_this_process = PartialState


class GradientState:
    """Gradient accumulation as it is now: a view of the newest Accelerator's, or of the one that was asked for it;
    without any every batch ends in a step."""

    _shared_state: ClassVar[_Shared] = _Shared()
    _without: ClassVar[Accumulation] = Accumulation(1)

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        _accumulation: Accumulation | None = None,
    ) -> None:
        self._own = _accumulation
        plugin = gradient_accumulation_plugin
        if plugin is not None:
            self._accumulation.steps = plugin.num_steps
            self._accumulation.sync_with_dataloader = plugin.sync_with_dataloader
            self._accumulation.sync_each_batch = plugin.sync_each_batch
            self._accumulation.adjust_scheduler = plugin.adjust_scheduler

    @property
    def _accumulation(self) -> Accumulation:
        if self._own is not None:
            return self._own
        session = Session.existing()
        return GradientState._without if session is None else session.accumulation

    @classmethod
    def _what_is_shared(cls) -> dict[str, Any]:
        return {} if Session.existing() is None else {"sync_gradients": cls().sync_gradients}

    @staticmethod
    def _reset_state() -> None:
        """Count micro-batches anew."""
        GradientState._without = Accumulation(1)
        session = Session.existing()
        if session is not None:
            session.accumulation.count_anew()

    @property
    def initialized(self) -> bool:
        return Session.existing() is not None

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends in an optimizer step."""
        return self._accumulation.is_boundary

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulation.is_boundary = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches for one optimizer step."""
        return self._accumulation.steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether prepared schedulers count the micro-batches between steps."""
        return Session.existing() is not None and self._accumulation.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends in a step whatever the count."""
        return self._accumulation.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "adjust_scheduler": self.adjust_scheduler,
            "sync_with_dataloader": self.sync_with_dataloader,
            "sync_each_batch": self._accumulation.sync_each_batch,
        }

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that gave the last batch and has not ended; None outside of any."""
        return self._accumulation.loaders.current

    @property
    def dataloader_references(self) -> list[Any]:
        """All prepared loaders that are being iterated, outermost first, after a None."""
        return [None, *self._accumulation.loaders.sources]

    @property
    def in_dataloader(self) -> bool:
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has given its last batch."""
        return self.in_dataloader and bool(self.active_dataloader.at_last_batch)

    @property
    def remainder(self) -> int:
        """How many samples of the active loader's last round are real; -1 outside of any loader."""
        return int(self.active_dataloader.remainder) if self.in_dataloader else -1

    @property
    def is_xla_gradients_synced(self) -> bool:
        """There is no XLA here."""
        return False

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )
