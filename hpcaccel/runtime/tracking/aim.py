"""Aim: a repository in ``logging_dir``. Run for real."""

from __future__ import annotations

import os
from typing import Any

from hpcaccel.runtime.tracking.general_tracker import GeneralTracker, on_main_process
from hpcaccel.runtime.tracking.values import is_number, leave_out, plain_values, yaml_safe

__all__ = ["AimTracker"]


class AimTracker(GeneralTracker):
    """Each attempt is a run of its own in Aim, which goes on in an older one only by that one's hash
    (``init_kwargs={"aim": {"run_hash": ...}}``).

    Args:
        run_name: the name of Aim's run.
        logging_dir: Aim's repository, made if there is none.
        kwargs: ``aim.Run``'s own.
    """

    name = "aim"
    requires_logging_directory = True
    packages = ("aim",)

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = logging_dir
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        from aim import Run

        os.makedirs(self.logging_dir, exist_ok=True)
        self.writer = Run(**{"repo": os.fspath(self.logging_dir), **self.init_kwargs})
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = yaml_safe(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """
        Args:
            values: numbers, or objects of Aim's own such as ``aim.Text``.
            kwargs: of ``Run.track``.
        """
        import aim

        for name, value in plain_values(values).items():
            if is_number(value) or type(value).__module__.startswith("aim."):
                self.writer.track(value, name=name, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.track(aim.Text(value), name=name, step=step, **kwargs)
            elif isinstance(value, dict):
                for part, number in value.items():
                    self.writer.track(number, name=f"{name}/{part}", step=step, **kwargs)
            else:
                leave_out(self.name, name, value, "numbers, texts and dicts of numbers")

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """
        Args:
            values: an image (an array or PIL's) by name, or a pair of an image and its caption.
            kwargs: ``{"aim_image": words of aim.Image, "track": words of Run.track}``.
        """
        import aim

        words = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            shown = aim.Image(image, caption=caption, **words.get("aim_image", {}))
            self.writer.track(shown, name=name, step=step, **words.get("track", {}))

    @on_main_process
    def finish(self) -> None:
        self.writer.close()
