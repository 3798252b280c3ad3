"""What a tracker is. A script makes its own from ``GeneralTracker``, for ``Accelerator(log_with=...)``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.rank_logger import this_rank

__all__ = ["GeneralTracker", "SilentTracker", "on_main_process"]

F = TypeVar("F", bound=Callable[..., Any])


def on_main_process(function: F) -> F:
    """For a tracker's methods: they run on rank 0 only, unless the tracker's ``main_process_only`` is False."""

    @wraps(function)
    def where_it_belongs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and this_rank() != 0:
            return None
        return function(self, *args, **kwargs)

    return cast(F, where_it_belongs)


class GeneralTracker:
    """Derive from it and give ``name``, ``requires_logging_directory``, ``tracker`` (the package's own object, usually
    a property), and those of the methods below that mean something to it.

    The Accelerator calls trackers on rank 0. ``main_process_only`` tells what ``on_main_process`` does to methods that
    a script calls itself, on any rank.

    Raises:
        RuntimeMisuse: one of the three is missing.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True
    packages: ClassVar[tuple[str, ...]] = ()
    """Importable names of what it needs, any one of which is enough; pip knows the first."""
    continued_run: str | None = None
    """The id of the run that this training is an attempt of, set before ``start``: each attempt is to go on where the
    last one was. None where there is no run directory."""

    def __init__(self, _blank: bool = False) -> None:
        missing = [] if _blank else [name for name in _NEEDED if name not in dir(self)]
        if missing:
            raise RuntimeMisuse(
                f"the tracker {type(self).__name__} has no {' and no '.join(missing)}. A tracker needs a name, "
                "requires_logging_directory (True or False) and tracker (what get_tracker(name, unwrap=True) gives)"
            )

    def start(self) -> None:
        """Open the tracker; called by ``init_trackers``. Nothing may be contacted or written before."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep what ``init_trackers(config=...)`` was given."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, texts, or dicts of numbers by name."""

    def flush(self) -> None:
        """Write out what is held back; called about once a second, before each checkpoint, and at the program's end."""

    def resumed(self, step: int) -> None:
        """A checkpoint was loaded: what an earlier attempt logged after ``step`` will come again."""

    def finish(self) -> None:
        """Close the tracker; called by ``end_training``."""


_NEEDED = ("name", "requires_logging_directory", "tracker")


class SilentTracker(GeneralTracker):
    """Every attribute of it can be called, with anything, and nothing happens: what ranks other than 0 get."""

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
