"""ClearML. Run for real in its offline mode."""

from __future__ import annotations

import os
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.tracking.general_tracker import GeneralTracker, on_main_process
from hpcaccel.runtime.tracking.values import is_number, leave_out, plain_values

__all__ = ["ClearMLTracker"]

_CHARTS = ("eval", "test", "train")


class ClearMLTracker(GeneralTracker):
    """A task that the script has begun with ``Task.init`` is used, and left open at the end.

    A number ``eval_loss`` is drawn in the chart ``loss`` as the line ``eval``; so are ``test_`` and ``train_``, and
    names without any of them belong to ``train``.

    Args:
        run_name: project and task, unless ``CLEARML_PROJECT`` and ``CLEARML_TASK`` or ``kwargs`` name others.
        kwargs: ``Task.init``'s own; ``continue_last_task`` makes attempts go on in one task.
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
            words = {
                "project_name": os.environ.get("CLEARML_PROJECT", self.run_name),
                "task_name": os.environ.get("CLEARML_TASK", self.run_name),
            }
            self.task = Task.init(**{**words, **self.init_kwargs})
            self._is_ours = True

    @property
    def tracker(self) -> Any:
        return self.task

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.task.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """
        Args:
            step: None: each number is a single value, without a chart.
            kwargs: of ``report_scalar`` or ``report_single_value``.
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
        """
        Args:
            values: an image (an array or PIL's) by name.
            kwargs: of ``report_image``.
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
        """A table, of ``columns`` and rows of ``data``, or of a data frame.

        Raises:
            RuntimeMisuse: neither data nor a data frame.
        """
        if dataframe is None and data is None:
            raise RuntimeMisuse(f"log_table({table_name!r}) needs data or dataframe, and has neither")
        table = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or [])]
        self.task.get_logger().report_table(**_chart(table_name), table_plot=table, iteration=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        if self._is_ours:
            self.task.close()


def _chart(name: str) -> dict[str, str]:
    series, _, title = name.partition("_")
    return {"title": title, "series": series} if title and series in _CHARTS else {"title": name, "series": "train"}
