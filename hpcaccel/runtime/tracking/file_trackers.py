"""Trackers that write local files: Aim, DVCLive and TensorBoard. Each was tested with its real package."""

from __future__ import annotations

import os
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcaccel.runtime.tracking.general_tracker import (
    GeneralTracker,
    config_leaves,
    is_number,
    leave_out,
    on_main_process,
    plain_values,
    yaml_safe,
)

__all__ = ["AimTracker", "DVCLiveTracker", "TensorBoardTracker"]


class AimTracker(GeneralTracker):
    """Logs to Aim. Each attempt is a separate run; to continue an older run, pass its hash
    (``init_kwargs={"aim": {"run_hash": ...}}``).

    Args:
        run_name: name of the Aim run.
        logging_dir: Aim's repository; created if missing.
        kwargs: passed to ``aim.Run``.
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
        """Log values by name; see ``GeneralTracker.log``.

        Args:
            values: numbers, texts, dicts of numbers, or Aim's objects such as ``aim.Text``.
            kwargs: passed to ``Run.track``.
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
                leave_out(self.name, name, value, "numbers, strings and dicts of numbers")

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Log images by name.

        Args:
            values: images (arrays or PIL images), or pairs of an image and its caption, by name.
            kwargs: ``{"aim_image": keywords of aim.Image, "track": keywords of Run.track}``.
        """
        import aim

        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            shown = aim.Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(shown, name=name, step=step, **options.get("track", {}))

    @on_main_process
    def finish(self) -> None:
        self.writer.close()


class DVCLiveTracker(GeneralTracker):
    """Logs with DVCLive. All attempts of a run write to one directory: each attempt passes ``resume=True``, because
    otherwise DVCLive empties the directory when it starts.

    Args:
        run_name: ignored; DVCLive names experiments itself.
        live: a ``dvclive.Live`` created by the script.
        kwargs: passed to ``dvclive.Live``, if ``live`` is None.
    """

    name = "dvclive"
    requires_logging_directory = False
    packages = ("dvclive",)

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.live = live
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        from dvclive import Live

        same = {"resume": True} if self.continued_run else {}
        self.live = Live(**{**same, **self.init_kwargs}) if self.live is None else self.live

    @property
    def tracker(self) -> Any:
        return self.live

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.live.log_params(yaml_safe(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values by name; see ``GeneralTracker.log``.

        Args:
            kwargs: passed to ``Live.log_metric``.
        """
        if step is not None:
            self.live.step = step
        for name, value in plain_values(values).items():
            if is_number(value) or isinstance(value, str):
                self.live.log_metric(name, value, **kwargs)
            elif isinstance(value, dict):
                for part, number in value.items():
                    self.live.log_metric(f"{name}/{part}", number, **kwargs)
            else:
                leave_out(self.name, name, value, "numbers, strings and dicts of numbers")
        self.live.next_step()

    @on_main_process
    def finish(self) -> None:
        self.live.end()


class TensorBoardTracker(GeneralTracker):
    """Writes event files to ``<logging_dir>/<run_name>``, with tensorboard or tensorboardX: numbers as scalars, strings
    as texts, dicts of numbers as scalars in one chart.

    All attempts of a run write to the same directory. After a resume, TensorBoard hides steps that an earlier attempt
    logged after the checkpoint.

    Args:
        run_name: the directory under ``logging_dir``.
        kwargs: passed to ``SummaryWriter``.
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
        """Write the HParams page, and a file ``hparams.yml`` next to the page's event file."""
        import yaml

        name = self.continued_run or str(time.time())  # the same in all attempts of a run
        if self._is_x:
            self.writer.add_hparams(config_leaves(values), {}, name=name)
        else:
            self.writer.add_hparams(config_leaves(values), {}, run_name=name)
        path = Path(self.logging_dir, name, "hparams.yml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(yaml_safe(values), sort_keys=False), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values by name; see ``GeneralTracker.log``.

        Args:
            kwargs: passed to ``add_scalar``, ``add_text`` or ``add_scalars``, depending on the value.
        """
        for name, value in plain_values(values).items():
            if is_number(value):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                leave_out(self.name, name, value, "numbers, strings and dicts of numbers")

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images by name.

        Args:
            values: batches of images by name, N×C×H×W unless ``dataformats`` is given.
            kwargs: passed to ``add_images``.
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
        # SummaryWriter(purge_step=...) writes this event to a new file; the step was unknown when this file was opened.
        events = import_module(f"{'tensorboardX' if self._is_x else 'tensorboard.compat'}.proto.event_pb2")
        mark = events.SessionLog(status=events.SessionLog.START)
        self.writer.file_writer.add_event(events.Event(step=step + 1, session_log=mark))

    @on_main_process
    def finish(self) -> None:
        self.writer.close()
