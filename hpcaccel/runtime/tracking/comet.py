"""Comet. Run for real in its offline mode (``init_kwargs={"comet_ml": {"online": False}}``)."""

from __future__ import annotations

import hashlib
from typing import Any

from hpcaccel.runtime.tracking.general_tracker import on_main_process
from hpcaccel.runtime.tracking.resumed_tracker import ContinuingTracker
from hpcaccel.runtime.tracking.values import is_number, leave_out, plain_values

__all__ = ["CometMLTracker"]


class CometMLTracker(ContinuingTracker):
    """Each attempt of a run goes on in the same Comet experiment, whose key is made of the run directory's id, unless
    ``kwargs`` or Comet's own variables name another. Offline each attempt is an experiment of its own. Comet must be
    3.41 or newer.

    Args:
        run_name: Comet's project.
        kwargs: ``comet_ml.start``'s own.
    """

    name = "comet_ml"
    packages = ("comet_ml",)
    # Offline a key must not come twice: archives are named by it, and by a random text that repeats where a seed does.
    own_words = frozenset({"experiment_key", "mode", "online"})
    own_variables = ("COMET_EXPERIMENT_KEY", "COMET_START_MODE", "COMET_START_ONLINE")

    @on_main_process
    def start(self) -> None:
        import comet_ml

        same: dict[str, str] = {}
        if self.goes_on_in:  # a key is 32 to 50 letters and digits
            same = {"experiment_key": hashlib.sha256(self.goes_on_in.encode()).hexdigest()[:32]}
        self.writer = comet_ml.start(project_name=self.run_name, **same, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """
        Args:
            kwargs: of ``log_metric``, ``log_other`` or ``log_metrics``, by what the values are.
        """
        if step is not None:
            self.writer.set_step(step)
        for name, value in plain_values(values).items():
            if is_number(value):
                self.writer.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, prefix=name, step=step, **kwargs)
            else:
                leave_out(self.name, name, value, "numbers, texts and dicts of numbers")

    @on_main_process
    def finish(self) -> None:
        self.writer.end()
