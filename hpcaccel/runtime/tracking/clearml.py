"""Tracker for ClearML. Tested in ClearML's offline mode."""

from __future__ import annotations

import os
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.tracking.general_tracker import (
    GeneralTracker,
    is_number,
    leave_out,
    on_main_process,
    plain_values,
)

__all__ = ["ClearMLTracker"]

_CHARTS = ("eval", "test", "train")


class ClearMLTracker(GeneralTracker):
    """Logs to the current ClearML task, or to a new one. A task that the script has started with ``Task.init`` remains
    open at the end.

    A number named ``eval_loss`` is plotted in the chart ``loss`` as the line ``eval``; the prefixes ``test_`` and
    ``train_`` work in the same way. Names without a prefix belong to the line ``train``.

    Args:
        run_name: name of the project and task, unless ``CLEARML_PROJECT`` and ``CLEARML_TASK`` or ``kwargs`` set them.
        kwargs: passed to ``Task.init``; with ``continue_last_task`` all attempts log to one task.
    """

    name = "clearml"
    requires_logging_directory = False
    packages = ("clearml",)

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._is_ours = False

    @on_main_process
    def start(self) -> None:
        from clearml import Task

        self.task = Task.current_task()
        if self.task is None:
            names = {
                "project_name": os.environ.get("CLEARML_PROJECT", self.run_name),
                "task_name": os.environ.get("CLEARML_TASK", self.run_name),
            }
            self.task = Task.init(**{**names, **self.init_kwargs})
            self._is_ours = True

    @property
    def tracker(self) -> Any:
        return self.task

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.task.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values by name; see ``GeneralTracker.log``.

        Args:
            step: if None, the values are reported as single values, without charts.
            kwargs: passed to ``report_scalar`` or ``report_single_value``.
        """
        logger = self.task.get_logger()
        for name, value in plain_values(values).items():
            if not is_number(value):
                leave_out(self.name, name, value, "numbers")
            elif step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                logger.report_scalar(**_chart(name), value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images by name.

        Args:
            values: images (arrays or PIL images) by name.
            kwargs: passed to ``report_image``.
        """
        for name, image in values.items():
            self.task.get_logger().report_image(**_chart(name), iteration=step, image=image, **kwargs)

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
        """Log a table: ``columns`` and rows of ``data``, or a data frame.

        Raises:
            RuntimeMisuse: neither ``data`` nor ``dataframe`` is given.
        """
        if dataframe is None and data is None:
            raise RuntimeMisuse(f"log_table({table_name!r}) needs data or dataframe")
        table = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or [])]
        self.task.get_logger().report_table(**_chart(table_name), table_plot=table, iteration=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        if self._is_ours:
            self.task.close()


def _chart(name: str) -> dict[str, str]:
    series, _, title = name.partition("_")
    return {"title": title, "series": series} if title and series in _CHARTS else {"title": name, "series": "train"}
