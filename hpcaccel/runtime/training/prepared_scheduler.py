"""Prepared schedulers: they step when their optimizers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcaccel.runtime.training.accumulation import Accumulation

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator_setup import Setup
    from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer

__all__ = ["PreparedScheduler", "prepare_scheduler"]


class PreparedScheduler:
    """A face for the user's scheduler, which stays reachable as ``scheduler``. What is not here is its own.

    Args:
        scheduler: anything with ``step``, ``state_dict`` and ``load_state_dict``.
        optimizers: those whose learning rate it sets.
        repeats: how often the user's scheduler steps for one step here.
        with_optimizer: False: it steps whenever the script says so, once.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        accumulation: Accumulation,
        *,
        repeats: int = 1,
        with_optimizer: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._accumulation = accumulation
        self._repeats = repeats
        self._with_optimizer = with_optimizer
        self._counts_evaluations = _counts_evaluations(scheduler)
        if not with_optimizer and hasattr(scheduler, "optimizer"):
            # torch warns when a scheduler steps before its optimizer does. This one may: in the middle of accumulation.
            scheduler.optimizer._opt_called = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        scheduler, accumulation = self.scheduler, self._accumulation
        if not self._with_optimizer:
            scheduler.step(*args, **kwargs)
            return
        if self._counts_evaluations:
            # An evaluation after an epoch counts wherever accumulation stands; one of a micro-batch at boundaries.
            if accumulation.is_boundary or not accumulation.inside:
                scheduler.step(*args, **kwargs)
            return
        if not accumulation.is_boundary:
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        for _ in range(self._repeats):
            # A schedule with an end of its own, such as OneCycleLR, fails when it is stepped beyond it.
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
    """The face of ``scheduler``, by the settings of the Accelerator that prepares it.

    Accelerate steps it once a process, and its users multiply their schedules accordingly, so that this is what happens
    unless the script says otherwise; the log says it, once.
    """
    session, settings = setup.session, setup.settings
    world_size = session.group.world_size
    per_process = settings.step_scheduler_per_process and not settings.split_batches
    with_optimizer = settings.step_scheduler_with_optimizer
    repeats = world_size if per_process and with_optimizer and not _counts_evaluations(scheduler) else 1
    if repeats > 1:
        session.loop.activity.say_once(
            f"the prepared scheduler steps {repeats} times for each optimizer step, once a process, as Accelerate's "
            "does. Accelerator(step_scheduler_per_process=False) steps it once"
        )
    set_by_it = getattr(scheduler, "optimizer", None)
    followed = [face for face in session.faces if set_by_it is face or set_by_it is face.optimizer]
    # One that does not say whose rates it sets, such as a script's own, follows all.
    return PreparedScheduler(
        scheduler, followed or session.faces, setup.accumulation, repeats=repeats, with_optimizer=with_optimizer
    )


def _counts_evaluations(scheduler: Any) -> bool:
    """Whether what is counted is not steps but values of a metric, as ``ReduceLROnPlateau`` does."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    return isinstance(scheduler, ReduceLROnPlateau)
