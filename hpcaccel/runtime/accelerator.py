"""The face of the runtime: what a training script calls. Every method is a few lines; the ideas live next door."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hpcaccel.runtime import ops, parallel, precision
from hpcaccel.runtime.clipping import clip_norm, clip_value
from hpcaccel.runtime.loop import Resumed
from hpcaccel.runtime.preparation import prepare
from hpcaccel.runtime.session import Session

__all__ = ["Accelerator"]


class Accelerator:
    """Takes a training loop to many GPUs, and back from wherever it was stopped.

    What is given here wins over the spec of the run, which wins over the defaults. A second one in the same process
    shares everything with the first, until ``end_training``.

    Args:
        gradient_accumulation_steps: micro-batches for one optimizer step.
        mixed_precision: ``no``, ``fp16`` or ``bf16``.
        cpu: leave GPUs alone.
        project_dir: where checkpoints and metrics go when there is no run directory.
        strategy: ``ddp``, or ``fsdp`` to shard the model over the ranks.
        seed: of Python, numpy and torch, on every rank.
        deterministic: the same bits in every run and after every resume.
        even_batches: fill up the last batches of an epoch so that all ranks get equally many.
        step_scheduler_per_process: step prepared schedulers once for each process, as Accelerate does and its users'
            schedules expect; False: once.

    Raises:
        RankEnvironmentError: the environment describes no usable group of ranks, or they do not find each other.
        RuntimeMisuse: a value that is not allowed.
    """

    def __init__(
        self,
        gradient_accumulation_steps: int | None = None,
        mixed_precision: str | None = None,
        *,
        cpu: bool = False,
        project_dir: str | os.PathLike[str] | None = None,
        strategy: str | None = None,
        seed: int | None = None,
        deterministic: bool | None = None,
        even_batches: bool = True,
        step_scheduler_per_process: bool = True,
    ) -> None:
        self._session = Session.current(
            cpu=cpu,
            project_dir=project_dir,
            gradient_accumulation_steps=gradient_accumulation_steps,
            mixed_precision=mixed_precision,
            strategy=strategy,
            seed=seed,
            deterministic=deterministic,
        )
        self._even_batches = even_batches
        self._step_scheduler_per_process = step_scheduler_per_process

    # -- where this process stands ----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._session.group.device

    @property
    def num_processes(self) -> int:
        return self._session.group.world_size

    @property
    def process_index(self) -> int:
        return self._session.group.rank

    @property
    def local_process_index(self) -> int:
        return self._session.group.env.local_rank

    @property
    def is_main_process(self) -> bool:
        return self._session.group.is_main

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends in an optimizer step."""
        return self._session.accumulation.is_boundary

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._session.accumulation.steps

    @property
    def mixed_precision(self) -> str:
        return self._session.settings.mixed_precision

    @property
    def step(self) -> int:
        """Optimizer steps done, those before a resume included."""
        return self._session.loop.step

    # -- preparing --------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Models, optimizers, loaders and schedulers, in any order, ready for this group of ranks; the same order comes
        back, a single object bare. What is none of these passes through."""
        prepared = prepare(
            self._session,
            objects,
            even_batches=self._even_batches,
            scheduler_repeats=self.num_processes if self._step_scheduler_per_process else 1,
        )
        return prepared[0] if len(objects) == 1 else tuple(prepared)

    def prepare_model(self, model: nn.Module) -> Any:
        return self.prepare(model)

    def prepare_optimizer(self, optimizer: Optimizer) -> Any:
        return self.prepare(optimizer)

    def prepare_data_loader(self, loader: DataLoader[Any]) -> Any:
        return self.prepare(loader)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        return self.prepare(scheduler)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The module as the script made it; a sharded one keeps its shards."""
        return parallel.unwrap(model)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore these too: anything with ``state_dict`` and ``load_state_dict``, the same on all ranks."""
        self._session.register(objects)

    # -- a training step --------------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Around each micro-batch: gradients are shared among the ranks only where an optimizer step follows."""
        self._session.accumulation.begin_micro_batch()
        with ExitStack() as stack:
            if not self.sync_gradients:
                for model in models:
                    stack.enter_context(parallel.no_sync(model))
            yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients to this rank."""
        return parallel.no_sync(model)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """``loss.backward()``, divided by the accumulation steps and scaled for fp16."""
        loss = loss / self.gradient_accumulation_steps if self.gradient_accumulation_steps > 1 else loss
        if self._session.scaler is not None:
            loss = self._session.scaler.scale(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def autocast(self) -> torch.autocast:
        """The precision of prepared models, for computations outside of them."""
        return precision.autocast(self.device, self.mixed_precision)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor | None:
        """Scale gradients down to ``max_norm``; the norm before, or None between accumulation boundaries."""
        return clip_norm(self._session, parameters, max_norm=max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value_: float) -> None:
        """Cut gradients off at ``clip_value_``."""
        clip_value(self._session, parameters, limit=clip_value_)

    # -- the five verbs: see hpcaccel.runtime.loop ------------------------------------------------------------------

    def resume(self) -> Resumed:
        """Load the newest checkpoint into everything prepared: ``step``, ``epoch`` and ``path`` (None at the start)."""
        return self._session.loop.resume()

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of ``count``; calls ``resume`` if the script has not."""
        return self._session.loop.epochs(count)

    def steps(self, count: int) -> Iterator[int]:
        """The steps that are left of ``count``, for loops without epochs; calls ``resume`` if the script has not."""
        return self._session.loop.steps(count)

    def checkpoint(self) -> None:
        """Once a step: saves when due; saves and leaves by SystemExit when the training is to go on another time."""
        self._session.loop.checkpoint()

    def should_stop(self) -> bool:
        """Whether the training is to end for good; ``epochs``, ``steps`` and the training's loader then end too."""
        return self._session.loop.should_stop()

    # -- telling ----------------------------------------------------------------------------------------------------

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write numbers to the run's metrics, on rank 0, for the current step; between accumulation boundaries nothing
        is written unless ``step`` is given."""
        if self.is_main_process and (self.sync_gradients or step is not None):
            loop = self._session.loop
            loop.metrics.write(values, step=loop.step if step is None else step, epoch=loop.epoch)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` once a node."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    # -- all ranks together -----------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        self._session.group.barrier()

    def gather(self, value: Any) -> Any:
        """All ranks' tensors, concatenated along dimension 0, on every rank."""
        return ops.gather(value, self._session.group)

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The ``sum`` or ``mean`` of all ranks' tensors, on every rank."""
        return ops.reduce(value, self._session.group, reduction=reduction, scale=scale)

    def save_state(self, output_dir: str | os.PathLike[str] | None = None) -> str:
        """Save everything prepared and registered now; where to, comes back."""
        return str(self._session.loop.save("save_state", None if output_dir is None else Path(output_dir).absolute()))

    def load_state(self, input_dir: str | os.PathLike[str] | None = None) -> Resumed:
        """Restore a checkpoint, or the newest one in a directory; without a path the run's newest."""
        return self._session.loop.load_newest(None if input_dir is None else Path(input_dir).absolute())

    # -- the end ----------------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        """Forget what was prepared; ``a, b = accelerator.free_memory(a, b)`` forgets the script's names for it too."""
        self._session.forget()
        return tuple(None for _ in objects)

    def end_training(self) -> None:
        """The training is over: its outcome is written, the group of ranks left. Programs that just end do so too."""
        self._session.end()
