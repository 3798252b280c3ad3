"""Trackers for services: Comet, SwanLab, Trackio and Weights & Biases.

Each tracker was tested with its real package in offline mode (Trackio locally).
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, ClassVar

from hpcaccel.runtime.tracking.general_tracker import (
    GeneralTracker,
    is_number,
    leave_out,
    on_main_process,
    plain_values,
)

__all__ = ["CometMLTracker", "HostedTracker", "SwanLabTracker", "TrackioTracker", "WandBTracker"]


class HostedTracker(GeneralTracker):
    """Tracker for a service that stores runs.

    Args:
        run_name: name of the service's project.
        kwargs: passed to the service's function that starts a run.
    """

    requires_logging_directory = False
    run_keywords: ClassVar[frozenset[str]] = frozenset()
    """Keywords in ``kwargs`` by which a script selects the service's run."""
    run_variables: ClassVar[tuple[str, ...]] = ()
    """Environment variables that select the service's run."""

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @property
    def shared_run(self) -> str | None:
        """Id of the service's run that all attempts share. None without a run directory, or if the user has selected a
        run of the service by keyword or variable."""
        chosen = self.run_keywords & set(self.init_kwargs) or any(map(os.environ.get, self.run_variables))
        return None if chosen else self.continued_run


class CometMLTracker(HostedTracker):
    """All attempts of a run log to one Comet experiment. The experiment's key is computed from the run directory's id,
    unless ``kwargs`` or Comet's variables select another experiment. Offline, each attempt is a separate experiment.
    Needs Comet 3.41 or newer.

    Args:
        run_name: Comet's project.
        kwargs: passed to ``comet_ml.start``.
    """

    name = "comet_ml"
    packages = ("comet_ml",)
    # Offline archives are named by the key and a random string, which is equal in all attempts with the same seed: with
    # one key for all attempts, each archive would replace the previous one.
    run_keywords = frozenset({"experiment_key", "mode", "online"})
    run_variables = ("COMET_EXPERIMENT_KEY", "COMET_START_MODE", "COMET_START_ONLINE")

    @on_main_process
    def start(self) -> None:
        import comet_ml

        same: dict[str, str] = {}
        if self.shared_run:  # a key has 32 to 50 letters and digits
            same = {"experiment_key": hashlib.sha256(self.shared_run.encode()).hexdigest()[:32]}
        self.writer = comet_ml.start(project_name=self.run_name, **same, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values by name; see ``GeneralTracker.log``.

        Args:
            kwargs: passed to ``log_metric``, ``log_other`` or ``log_metrics``, depending on the value.
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
                leave_out(self.name, name, value, "numbers, strings and dicts of numbers")

    @on_main_process
    def finish(self) -> None:
        self.writer.end()


class SwanLabTracker(HostedTracker):
    """All attempts of a run log to the SwanLab run whose id is that of the run directory, unless ``kwargs`` select
    another run.

    Args:
        run_name: SwanLab's project.
        kwargs: passed to ``swanlab.init``.
    """

    name = "swanlab"
    main_process_only = False
    packages = ("swanlab",)
    run_keywords = frozenset({"id", "resume"})

    @on_main_process
    def start(self) -> None:
        import swanlab

        same = {"id": self.shared_run, "resume": "allow"} if self.shared_run else {}
        self.run = swanlab.init(project=self.run_name, **same, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        import swanlab

        swanlab.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        import swanlab

        shown = {n: swanlab.Text(v) if isinstance(v, str) else v for n, v in plain_values(values).items()}
        self.run.log(shown, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values by name; see ``GeneralTracker.log``.

        Args:
            values: lists of images (arrays or PIL images) by name.
        """
        import swanlab

        self.log({name: [swanlab.Image(image) for image in images] for name, images in values.items()}, step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()


class TrackioTracker(HostedTracker):
    """All attempts of a run log to the Trackio run whose name is the run directory's id, unless ``kwargs`` select
    another run.

    Args:
        run_name: Trackio's project.
        kwargs: passed to ``trackio.init``.
    """

    name = "trackio"
    main_process_only = False
    packages = ("trackio",)
    run_keywords = frozenset({"name", "resume"})

    @on_main_process
    def start(self) -> None:
        import trackio

        same = {"name": self.shared_run, "resume": "allow"} if self.shared_run else {}
        self.run = trackio.init(project=self.run_name, **same, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(plain_values(values), step=step, **kwargs)  # Trackio ignores tensors

    @on_main_process
    def finish(self) -> None:
        self.run.finish()


class WandBTracker(HostedTracker):
    """All attempts of a run log to the W&B run whose id is that of the run directory, unless ``kwargs`` or W&B's
    variables select another run. W&B stores only the last value per name and step, and drops steps before its newest
    step.

    Args:
        run_name: W&B's project.
        kwargs: passed to ``wandb.init``.
    """

    name = "wandb"
    main_process_only = False
    packages = ("wandb",)
    run_keywords = frozenset({"id", "resume", "resume_from", "fork_from", "reinit"})
    run_variables = ("WANDB_RUN_ID", "WANDB_RESUME")

    @on_main_process
    def start(self) -> None:
        import wandb

        same = {"id": self.shared_run, "resume": "allow"} if self.shared_run else {}
        self.run = wandb.init(project=self.run_name, **same, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values by name; see ``GeneralTracker.log``.

        Args:
            kwargs: passed to ``Run.log``.
        """
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images by name.

        Args:
            values: lists of images (arrays or PIL images) by name.
        """
        import wandb

        self.log({name: [wandb.Image(image) for image in images] for name, images in values.items()}, step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table: ``columns`` and rows of ``data``, or a data frame."""
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
