"""SwanLab. Run for real in its offline mode."""

from __future__ import annotations

from typing import Any

from hpcaccel.runtime.tracking.general_tracker import on_main_process
from hpcaccel.runtime.tracking.resumed_tracker import ContinuingTracker
from hpcaccel.runtime.tracking.values import plain_values

__all__ = ["SwanLabTracker"]


class SwanLabTracker(ContinuingTracker):
    """Each attempt of a run goes on in the SwanLab run of the run directory's id, unless ``kwargs`` name another.

    Args:
        run_name: SwanLab's project.
        kwargs: ``swanlab.init``'s own.
    """

    name = "swanlab"
    main_process_only = False
    packages = ("swanlab",)
    own_words = frozenset({"id", "resume"})

    @on_main_process
    def start(self) -> None:
        import swanlab

        same = {"id": self.goes_on_in, "resume": "allow"} if self.goes_on_in else {}
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
