"""DVCLive. Run for real."""

from __future__ import annotations

from typing import Any

from hpcaccel.runtime.tracking.general_tracker import GeneralTracker, on_main_process
from hpcaccel.runtime.tracking.values import is_number, leave_out, plain_values, yaml_safe

__all__ = ["DVCLiveTracker"]


class DVCLiveTracker(GeneralTracker):
    """The attempts of a run add to the same directory, which DVCLive would otherwise empty at each start.

    Args:
        run_name: not used: DVCLive names experiments by itself.
        live: a ``dvclive.Live`` that the script has made.
        kwargs: those of ``dvclive.Live``, where the script has made none.
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
        """
        Args:
            kwargs: of ``Live.log_metric``.
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
                leave_out(self.name, name, value, "numbers, texts and dicts of numbers")
        self.live.next_step()

    @on_main_process
    def finish(self) -> None:
        self.live.end()
