"""TPUs, and other devices of torch_xla. Used if PJRT_DEVICE is set, or if torch_xla is imported and there is no GPU.

torch_xla records operations and compiles them as one graph at each ``sync`` (formerly ``mark_step``). A graph is
compiled again for each new combination of shapes, so all batches should have one shape. A prepared loader calls
``sync`` before each batch, as torch_xla's MpDeviceLoader does. Models are not wrapped in DDP: a ``GradientReducer``
averages the gradients before an optimizer's step or a clipping, as ``xm.optimizer_step`` does.

The functions with the names of ``torch.cuda`` are those that ``device_backend`` calls for every kind of device.

Source: torch_xla 2.9.0.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hpcaccel.errors import RankEnvironmentError

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.process_group import RankGroup
    from hpcaccel.runtime.distributed.rank_env import RankEnvironment

DEFAULT_PORT = 29500
"""torchrun's default port."""

logger = logging.getLogger("hpcaccel.training")

__all__ = [
    "BatchPlacer",
    "GradientReducer",
    "current_device",
    "device",
    "device_count",
    "get_device_name",
    "get_rng_state",
    "gradients_are_reduced",
    "is_initialized",
    "is_wanted",
    "manual_seed",
    "place_of_spawned",
    "reducer",
    "register_backend",
    "set_rng_state",
    "share",
    "sync",
    "synchronize",
]


def is_wanted() -> bool:
    """Whether PJRT_DEVICE selects torch_xla. An installed or imported torch_xla does not suffice: the machine may have
    GPUs, and other libraries import torch_xla."""
    return bool(os.environ.get("PJRT_DEVICE")) and find_spec("torch_xla") is not None


def _xla() -> Any:
    return import_module("torch_xla")


def _model() -> Any:
    return import_module("torch_xla.core.xla_model")


def device() -> torch.device:
    """This process's XLA device."""
    found: torch.device = _xla().device()
    return found


def device_count() -> int:
    """Always 1: each process drives one device."""
    return 1


def current_device() -> int:
    return device().index or 0


def is_initialized() -> bool:
    """Whether this process has imported torch_xla."""
    return "torch_xla" in sys.modules


def get_device_name() -> str:
    """The hardware, such as ``TPU`` or ``CPU``."""
    return str(_model().xla_device_hw(device()))


def sync() -> None:
    """Compile and start the operations that were recorded since the last call."""
    _xla().sync()


def synchronize() -> None:
    """Run all operations that were recorded, and wait for them."""
    _xla().sync(wait=True)


def get_rng_state() -> int:
    """The state of the device's generator, a number."""
    return int(_model().get_rng_state())


def set_rng_state(state: int) -> None:
    _model().set_rng_state(state)


def manual_seed(seed: int) -> None:
    _model().set_rng_state(seed)


def place_of_spawned(env: RankEnvironment) -> RankEnvironment:
    """``env``, or this process's place among the processes that torch_xla has spawned (``xmp.spawn``), for which no
    launcher has set variables. MASTER_PORT sets the port of their store."""
    runtime = import_module("torch_xla.runtime")
    world = int(runtime.world_size())
    if env.world_size > 1 or world == 1:
        return env
    local = int(runtime.local_process_count())
    return replace(
        env,
        rank=int(runtime.global_ordinal()),
        world_size=world,
        local_rank=int(runtime.local_ordinal()),
        local_world_size=local,
        largest_node=local,
        master_addr="127.0.0.1" if local == world else str(runtime.get_master_ip()),
        master_port=int(os.environ.get("MASTER_PORT") or DEFAULT_PORT),
        source="xla",
    )


def register_backend(world_size: int) -> None:
    """Register torch_xla's process group, before the default group is created.

    Raises:
        RankEnvironmentError: torch_xla counts a different number of processes.
    """
    import_module("torch_xla.distributed.xla_backend")
    found = int(import_module("torch_xla.runtime").world_size())
    if found != world_size:
        raise RankEnvironmentError(
            f"torch_xla counts {found} process(es), but there are {world_size} ranks. Start one rank per TPU chip with "
            "torchrun (`launcher: torchrun`), and set PJRT_DEVICE=TPU before the start"
        )


def share(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks. Collective."""
    _model().broadcast_master_param(model)


class GradientReducer:
    """Averages the gradients of optimizers over all ranks, once per step: before a clipping or the step itself."""

    def __init__(self) -> None:
        self._reduced: WeakSet[Optimizer] = WeakSet()
        """Optimizers whose gradients have been averaged, and whose step is due."""

    @property
    def has_reduced(self) -> bool:
        return bool(self._reduced)

    def reduce(self, optimizer: Optimizer) -> None:
        """Average the optimizer's gradients, unless this has been done for its next step. Collective."""
        if optimizer not in self._reduced:
            _model().reduce_gradients(optimizer)
            self._reduced.add(optimizer)

    def step_is_done(self, optimizer: Optimizer) -> None:
        self._reduced.discard(optimizer)


_reducer = GradientReducer()


def reducer(group: RankGroup) -> GradientReducer | None:
    """This process's reducer; None for a single rank, and on devices for which DDP averages the gradients."""
    return _reducer if group.device.type == "xla" and group.world_size > 1 else None


def gradients_are_reduced() -> bool:
    """Whether an optimizer's gradients have been averaged, and its step is due."""
    return _reducer.has_reduced


class BatchPlacer:
    """Moves the batches of a loader to the device, after ``sync``. Logs a warning, once, if their shapes change.

    Args:
        move: moves a batch to the device.
    """

    def __init__(self, move: Callable[[Any], Any]) -> None:
        self._move = move
        self._shapes: list[Any] | None = None
        self._warned = False

    def __call__(self, batch: Any) -> Any:
        sync()
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        if self._shapes is None:
            self._shapes = shapes
        elif shapes != self._shapes and not self._warned:
            self._warned = True
            logger.warning(
                "the shapes of the batches change, from %s to %s: XLA compiles the training step again for each new "
                "shape. Use drop_last=True, and pad all batches to one length",
                self._shapes,
                shapes,
            )
        return self._move(batch)
