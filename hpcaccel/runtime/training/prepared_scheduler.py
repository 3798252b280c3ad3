"""``PreparedScheduler``: a scheduler that steps when its optimizers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcaccel.runtime.training.accumulation import Accumulation

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator_setup import Setup
    from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer

__all__ = ["PreparedScheduler", "prepare_scheduler"]


class PreparedScheduler:
    """Wraps the script's scheduler (attribute ``scheduler``), and delegates all other attributes to it.

    Args:
        scheduler: an object with ``step``, ``state_dict`` and ``load_state_dict``.
        optimizers: the optimizers whose learning rate the scheduler sets.
        repeats: number of steps of the script's scheduler per optimizer step; 1 with ``split_batches``.
        step_with_optimizer: whether to step only when the optimizers do. If False, step once at every call.
        split_batches: whether the batch size is the total over all ranks.
    """

    gradient_state: Any
    """View of the accumulation's state, as Accelerate's scheduler has it. ``prepare`` sets it."""

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        accumulation: Accumulation,
        *,
        repeats: int = 1,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._accumulation = accumulation
        self._repeats = repeats
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self._counts_evaluations = _counts_evaluations(scheduler)
        if not step_with_optimizer and hasattr(scheduler, "optimizer"):
            # Suppress torch's warning: during accumulation a scheduler may step before its optimizer.
            scheduler.optimizer._opt_called = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        own = self.__dict__  # read once: a class with ``__getattr__`` reads each attribute several times more slowly
        scheduler, accumulation = own["scheduler"], own["_accumulation"]
        if not own["step_with_optimizer"]:
            scheduler.step(*args, **kwargs)
            return
        if own["_counts_evaluations"]:
            # A metric after an epoch always counts; a metric of a micro-batch counts at boundaries only.
            if accumulation.is_boundary or not accumulation.inside:
                scheduler.step(*args, **kwargs)
            return
        if not accumulation.is_boundary:
            return
        for optimizer in own["optimizers"]:
            if optimizer.step_was_skipped:
                return
        for _ in range(1 if own["split_batches"] else own["_repeats"]):
            # Schedules with a fixed length, such as OneCycleLR, raise an error beyond their end.
            total = getattr(scheduler, "total_steps", None)
            if total is None or scheduler.last_epoch < total:
                scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> Any:
        return self.scheduler.get_last_lr()

    def get_lr(self) -> Any:
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        return self.scheduler.print_lr(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"Prepared({self.scheduler!r})"


def prepare_scheduler(setup: Setup, scheduler: Any) -> PreparedScheduler:
    """Prepare a scheduler with the settings of an Accelerator.

    By default the scheduler steps once per process at each optimizer step, which is logged. Accelerate does the same,
    and its users lengthen their schedules accordingly.
    """
    session, settings = setup.session, setup.settings
    world_size = session.group.world_size
    repeats = world_size if settings.step_scheduler_per_process and not _counts_evaluations(scheduler) else 1
    if repeats > 1 and settings.step_scheduler_with_optimizer and not settings.split_batches:
        session.loop.context.log_once(
            f"the prepared scheduler steps {repeats} times per optimizer step, once per process, as in Accelerate. To "
            "step it once, pass Accelerator(step_scheduler_per_process=False)"
        )
    scheduled = getattr(scheduler, "optimizer", None)
    followed = [one for one in session.optimizers if scheduled is one or scheduled is one.optimizer]
    # A scheduler without the attribute ``optimizer``, such as a custom one, follows all optimizers.
    return PreparedScheduler(
        scheduler,
        followed or session.optimizers,
        setup.accumulation,
        repeats=repeats,
        step_with_optimizer=settings.step_scheduler_with_optimizer,
        split_batches=settings.split_batches,
    )


def _counts_evaluations(scheduler: Any) -> bool:
    """Whether the scheduler counts metric values instead of steps, that is, is a ``ReduceLROnPlateau``."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    return isinstance(scheduler, ReduceLROnPlateau)
