"""``GeneralTracker``, the base class of all trackers, and conversion of the values that they accept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.rank_logger import get_logger, this_rank
from hpcaccel.runtime.training.metrics_writer import plain

__all__ = [
    "GeneralTracker",
    "SilentTracker",
    "config_leaves",
    "is_number",
    "leave_out",
    "on_main_process",
    "plain_values",
    "yaml_safe",
]

F = TypeVar("F", bound=Callable[..., Any])


def on_main_process(function: F) -> F:
    """Decorator for a tracker's methods: run on rank 0 only, unless the tracker's ``main_process_only`` is False."""

    @wraps(function)
    def run_on_main_process(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and this_rank() != 0:
            return None
        return function(self, *args, **kwargs)

    return cast(F, run_on_main_process)


class GeneralTracker:
    """Base class of trackers. A derived class defines ``name``, ``requires_logging_directory`` and ``tracker`` (the
    package's object, usually a property), and overrides the methods below as needed.

    The Accelerator calls trackers on rank 0. A script may call their methods on any rank: if ``main_process_only`` is
    True, methods decorated with ``on_main_process`` do nothing on ranks other than 0.

    Raises:
        RuntimeMisuse: the class lacks one of the three attributes.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True
    packages: ClassVar[tuple[str, ...]] = ()
    """Import names of packages, one of which must be installed; the first is also the name on PyPI."""
    continued_run: str | None = None
    """Id of the run of which this training is an attempt, set before ``start``, so that an attempt can continue the
    previous attempt's run in the tracker. None without a run directory."""

    def __init__(self, _blank: bool = False) -> None:
        missing = [] if _blank else [name for name in _NEEDED if name not in dir(self)]
        if missing:
            raise RuntimeMisuse(
                f"the tracker {type(self).__name__} has no {' and no '.join(missing)}. A tracker needs a name, "
                "requires_logging_directory (True or False) and tracker (what get_tracker(name, unwrap=True) returns)"
            )

    def start(self) -> None:
        """Open the tracker; called by ``init_trackers``. The constructor must not connect or write anything."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store ``config`` of ``init_trackers``."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values at a step.

        Args:
            values: numbers, strings, or dicts of numbers, by name.
            step: the optimizer step; None before the first one.
            kwargs: options of the tracker's own function.
        """

    def flush(self) -> None:
        """Write buffered values; called by ``Accelerator.log`` about once a second, before each checkpoint, and at the
        end."""

    def resumed(self, step: int) -> None:
        """Called after a checkpoint was loaded: values that were logged after ``step`` will be logged again."""

    def finish(self) -> None:
        """Close the tracker; called by ``end_training``, and by another call to ``init_trackers``."""


_NEEDED = ("name", "requires_logging_directory", "tracker")


class SilentTracker(GeneralTracker):
    """Stands for a tracker that is not running on this rank: methods of any name take any arguments and do nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def __iter__(self) -> Any:
        return iter(())


logger = get_logger(__name__)


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert one-element tensors and arrays to numbers, including those inside dicts."""
    return {name: plain_values(value) if isinstance(value, Mapping) else plain(value) for name, value in values.items()}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def leave_out(tracker: str, name: str, value: Any, takes: str) -> None:
    """Warn once that ``tracker`` does not accept a value, which is therefore not logged."""
    logger.warning_once("%s accepts only %s: %r (%s) is not logged", tracker, takes, name, type(value).__name__)


def config_leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert each value of a configuration to a number, a bool or a string."""
    leaves = {str(name): plain(value) for name, value in config.items()}
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in leaves.items()
    }


def yaml_safe(value: Any) -> Any:
    """Convert ``value`` to lists and dicts of numbers, bools, None and strings."""
    if isinstance(value, Mapping):
        return {str(name): yaml_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [yaml_safe(item) for item in value]
    value = plain(value)
    if type(value) in (bool, int, str, type(None)):
        return value
    return float(value) if isinstance(value, float) else str(value)  # other subclasses, such as enums, become strings
