"""``AcceleratorState``: this process's rank and device, and its Accelerator's settings."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.enums import DistributedType, of_strategy
from hpcaccel.runtime.states.partial_state import PartialState
from hpcaccel.runtime.training_session import TrainingSession

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hpcaccel.runtime.deepspeed.plugin import DeepSpeedPlugin

__all__ = ["AcceleratorState", "is_initialized"]


def is_initialized() -> bool:
    """Whether this process has an Accelerator whose training has not ended."""
    return TrainingSession.existing() is not None


class AcceleratorState(PartialState):
    """Settings of this process's Accelerator, and the properties of ``PartialState``.

    The plugin arguments and ``parallelism_config`` are ignored: pass them to ``Accelerator``.

    Raises:
        RuntimeMisuse: there is no Accelerator yet, or ``mixed_precision`` or ``cpu`` differs from the Accelerator's.
    """

    _last_session: ClassVar[Callable[[], TrainingSession | None]] = lambda: None
    """Weak reference to the latest session, so that models of an Accelerator that is no longer used can be freed."""

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
        _session: TrainingSession | None = None,
    ) -> None:
        self._own = _session
        found = _session or TrainingSession.existing() or AcceleratorState._last_session()
        if found is None:
            raise RuntimeMisuse("AcceleratorState() was called before Accelerator(): create an Accelerator first")
        AcceleratorState._last_session = weakref.ref(found)
        given = {"mixed_precision": None if mixed_precision is None else str(mixed_precision).lower()}
        found.refuse_changes({**given, "cpu": cpu})

    @property
    def _session(self) -> TrainingSession:
        session = self._own or TrainingSession.existing() or AcceleratorState._last_session()
        if session is None:
            raise AttributeError("AcceleratorState was reset, or its Accelerator was deleted: create an Accelerator()")
        return session

    @property
    def _world(self) -> World:
        return self._session.world

    @classmethod
    def _shared_values(cls) -> dict[str, Any]:
        session = TrainingSession.existing()
        return (
            {}
            if session is None
            else {**PartialState._shared_state, "mixed_precision": session.settings.mixed_precision}
        )

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Drop this process's Accelerator, so that the next one may have other settings. The process group is kept."""
        AcceleratorState._last_session = lambda: None
        session = TrainingSession.existing()
        if session is not None:
            session.was_reset = True
            session.abandon()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def initialized(self) -> bool:
        """Whether a training has begun in this process."""
        return TrainingSession.existing() is not None

    @property
    def distributed_type(self) -> DistributedType:
        """How the training is distributed: FSDP or DEEPSPEED for these strategies, MULTI_CPU, MULTI_GPU, MULTI_XPU …
        for other groups of ranks, and NO for a single process; or the value that the script has set.

        A value that the script has set affects only this property and ``join_uneven_inputs``.
        """
        return self._session.distributed_type

    @distributed_type.setter
    def distributed_type(self, value: DistributedType) -> None:
        real = of_strategy(self._session.settings.strategy, self._world.distributed_type)
        self._session.distributed_type_override = None if value == real else DistributedType(value)

    @property
    def mixed_precision(self) -> str:
        """Precision of the forward pass: ``no``, ``fp16``, ``bf16`` or ``fp8``."""
        return self._session.settings.mixed_precision

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded over the ranks (strategy ``fsdp``)."""
        return self._session.settings.strategy == "fsdp"

    @property
    def fsdp_plugin(self) -> Any:
        """The FSDP settings of the ``Accelerator``; None if it got none."""
        return self._session.handlers.fsdp

    @property
    def dynamo_plugin(self) -> Any:
        """The compiler settings of the ``Accelerator``."""
        return self._session.handlers.dynamo

    @property
    def torch_tp_plugin(self) -> Any:
        """The tensor-parallel settings of the ``Accelerator``; None if it got none."""
        return self._session.handlers.tensor_parallel

    @property
    def parallelism_config(self) -> Any:
        """The mesh sizes of the ``Accelerator``; None if it got none."""
        return self._session.handlers.parallelism

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of ranks. The first read is a collective call of all ranks."""
        return self._session.mesh

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The ``DeepSpeedPlugin`` that ``prepare`` uses; None without DeepSpeed."""
        from hpcaccel.runtime.deepspeed.plugin_choice import active_plugin

        return active_plugin(self.deepspeed_plugins)

    @property
    def deepspeed_plugins(self) -> DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None:
        """The plugin, or the plugins by name, as they were passed to ``Accelerator``; None without DeepSpeed."""
        found: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = self._session.handlers.deepspeed
        return found

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """One of several plugins.

        Raises:
            RuntimeMisuse: there is no plugin with this name.
        """
        from hpcaccel.runtime.deepspeed.plugin_choice import plugin_named

        return plugin_named(self.deepspeed_plugins, name)

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Let ``prepare`` use the plugin with this name from now on; by default, the first one.

        Raises:
            RuntimeMisuse: there is no plugin with this name.
        """
        from hpcaccel.runtime.deepspeed.plugin_choice import select_plugin

        select_plugin(self.deepspeed_plugins, name)

    @property
    def megatron_lm_plugin(self) -> None:
        """None, as in Accelerate without Megatron-LM."""
        return None

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"
