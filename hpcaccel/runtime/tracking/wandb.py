"""Weights & Biases. Run for real in its offline mode."""

from __future__ import annotations

from typing import Any

from hpcaccel.runtime.tracking.general_tracker import on_main_process
from hpcaccel.runtime.tracking.resumed_tracker import ContinuingTracker

__all__ = ["WandBTracker"]


class WandBTracker(ContinuingTracker):
    """Each attempt of a run goes on in the same W&B run, which has the id of the run directory, unless ``kwargs`` or
    W&B's own variables name another. W&B keeps one value a name and step, the last, and no step before its newest.

    Args:
        run_name: W&B's project.
        kwargs: ``wandb.init``'s own.
    """

    name = "wandb"
    main_process_only = False
    packages = ("wandb",)
    own_words = frozenset({"id", "resume", "resume_from", "fork_from", "reinit"})
    own_variables = ("WANDB_RUN_ID", "WANDB_RESUME")

    @on_main_process
    def start(self) -> None:
        import wandb

        same = {"id": self.goes_on_in, "resume": "allow"} if self.goes_on_in else {}
        self.run = wandb.init(project=self.run_name, **same, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """
        Args:
            kwargs: of ``Run.log``.
        """
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """
        Args:
            values: lists of images (arrays or PIL's) by name.
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
        """A table, of ``columns`` and rows of ``data``, or of a data frame."""
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
