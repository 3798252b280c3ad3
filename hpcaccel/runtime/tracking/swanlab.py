"""SwanLab. Run for real in its offline mode."""

from __future__ import annotations

from typing import Any

from hpcaccel.runtime.tracking.base import GeneralTracker, on_main_process
from hpcaccel.runtime.tracking.values import plain_values

__all__ = ["SwanLabTracker"]


class SwanLabTracker(GeneralTracker):
    """Each attempt of a run goes on in the SwanLab run of the run directory's id, unless ``kwargs`` name another.

    Args:
        run_name: SwanLab's project.
        kwargs: ``swanlab.init``'s own.
    """

    name = "swanlab"
    requires_logging_directory = False
    main_process_only = False
    packages = ("swanlab",)

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        import swanlab

        same: dict[str, Any] = {}
        if self.continued_run and not {"id", "resume"} & set(self.init_kwargs):
            same = {"id": self.continued_run, "resume": "allow"}
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
        """
        Args:
            values: lists of images (arrays or PIL's) by name.
        """
        import swanlab

        self.log({name: [swanlab.Image(image) for image in images] for name, images in values.items()}, step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
