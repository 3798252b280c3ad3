"""TensorBoard: event files under ``<logging_dir>/<project name>``. Run for real, with tensorboard and tensorboardX."""

from __future__ import annotations

import os
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcaccel.runtime.tracking.general_tracker import GeneralTracker, on_main_process
from hpcaccel.runtime.tracking.values import config_leaves, is_number, leave_out, plain_values, yaml_safe

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(GeneralTracker):
    """Numbers as scalars, texts as texts, dicts of numbers as scalars in one chart.

    After a resume the same directory is written, and TensorBoard is told to hide what a dead attempt logged beyond the
    checkpoint.

    Args:
        run_name: the directory under ``logging_dir``.
        kwargs: ``SummaryWriter``'s own.
    """

    name = "tensorboard"
    requires_logging_directory = True
    packages = ("tensorboard", "tensorboardX")

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        self._is_x = find_spec("tensorboard") is None
        module = import_module("tensorboardX" if self._is_x else "torch.utils.tensorboard")
        self.writer = module.SummaryWriter(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The HParams page, and ``hparams.yml`` next to its event file."""
        import yaml

        name = self.continued_run or str(time.time())  # of one run: the same for each attempt
        if self._is_x:
            self.writer.add_hparams(config_leaves(values), {}, name=name)
        else:
            self.writer.add_hparams(config_leaves(values), {}, run_name=name)
        path = Path(self.logging_dir, name, "hparams.yml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(yaml_safe(values), sort_keys=False), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """
        Args:
            kwargs: of ``add_scalar``, ``add_text`` or ``add_scalars``, by what the values are.
        """
        for name, value in plain_values(values).items():
            if is_number(value):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                leave_out(self.name, name, value, "numbers, texts and dicts of numbers")

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """
        Args:
            values: stacks of images by name, N×C×H×W unless ``dataformats`` says otherwise.
            kwargs: of ``add_images``.
        """
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    @on_main_process
    def flush(self) -> None:
        self.writer.flush()

    @on_main_process
    def resumed(self, step: int) -> None:
        if "purge_step" in self.init_kwargs:
            return
        # What SummaryWriter(purge_step=...) writes into a new file; when this one was opened the step was not known.
        events = import_module(f"{'tensorboardX' if self._is_x else 'tensorboard.compat'}.proto.event_pb2")
        mark = events.SessionLog(status=events.SessionLog.START)
        self.writer.file_writer.add_event(events.Event(step=step + 1, session_log=mark))

    @on_main_process
    def finish(self) -> None:
        self.writer.close()
