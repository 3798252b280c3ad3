"""The known trackers and their availability: registration, selection, installed packages."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.enums import LoggerType
from hpcaccel.runtime.tracking.clearml import ClearMLTracker
from hpcaccel.runtime.tracking.file_trackers import AimTracker, DVCLiveTracker, TensorBoardTracker
from hpcaccel.runtime.tracking.general_tracker import GeneralTracker
from hpcaccel.runtime.tracking.hosted_trackers import CometMLTracker, SwanLabTracker, TrackioTracker, WandBTracker
from hpcaccel.runtime.tracking.mlflow import MLflowTracker

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "filter_trackers",
    "get_available_trackers",
    "is_installed",
    "register_tracker_class",
    "sort_out",
]

Wanted = LoggerType | str | GeneralTracker

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    kind.name: kind
    for kind in (
        AimTracker,
        CometMLTracker,
        MLflowTracker,
        TensorBoardTracker,
        WandBTracker,
        ClearMLTracker,
        DVCLiveTracker,
        SwanLabTracker,
        TrackioTracker,
    )
}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Register a tracker class of the script under its ``name``, for ``log_with``.

    The class is called with the project's name, the logging directory if it ``requires_logging_directory``, and the
    keyword arguments in ``init_kwargs[name]``.

    Raises:
        RuntimeMisuse: the class is not derived from GeneralTracker, or lacks ``name`` or
            ``requires_logging_directory``.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise RuntimeMisuse(f"register_tracker_class({tracker_class!r}): expected a class derived from GeneralTracker")
    if not getattr(tracker_class, "name", None) or not hasattr(tracker_class, "requires_logging_directory"):
        raise RuntimeMisuse(
            f"register_tracker_class({tracker_class.__name__}): the class must define name and "
            "requires_logging_directory (True or False)"
        )
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"the tracker {tracker_class.name!r} is now {tracker_class.__name__}, instead of "
            f"{LOGGER_TYPE_TO_CLASS[tracker_class.name].__name__}",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def get_available_trackers() -> list[LoggerType]:
    """The trackers of ``LoggerType`` whose packages are installed."""
    return [LoggerType(name) for name in _built_in() if is_installed(LOGGER_TYPE_TO_CLASS[name])]


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[Wanted]:
    """The trackers that can be used; warns about each tracker that cannot. See ``sort_out``."""
    usable, unusable = sort_out(log_with, logging_dir)
    for why in unusable.values():
        warnings.warn(why, stacklevel=2)
    return usable


def sort_out(log_with: Any, logging_dir: Any = None) -> tuple[list[Wanted], dict[str, str]]:
    """Split the requested trackers into usable and unusable ones.

    Args:
        log_with: a name, a member of ``LoggerType``, a tracker, or a list of these; ``all`` selects all installed
            trackers.
        logging_dir: directory for trackers that write files; None if there is none.

    Returns:
        A list of the usable trackers, each once, and a dict with the reason why each other tracker is not usable, by
        name.

    Raises:
        RuntimeMisuse: a name is unknown, an object is not a tracker, or (except with ``all``) a tracker needs a
            directory and there is none.
    """
    items = [] if log_with is None else list(log_with) if isinstance(log_with, list | tuple | set) else [log_with]
    everything = any(isinstance(item, str) and str(item) == "all" for item in items)
    if everything:
        items = [*(item for item in items if isinstance(item, GeneralTracker)), *get_available_trackers()]
    usable: list[Wanted] = []
    unusable: dict[str, str] = {}
    for item in items:
        item = item if isinstance(item, GeneralTracker) else _named(item)
        why = None if isinstance(item, GeneralTracker) else _obstacle(str(item), logging_dir, forgive=everything)
        if why is not None:
            unusable[str(item)] = why
        elif item not in usable:
            usable.append(item)
    return usable, unusable


def _obstacle(name: str, logging_dir: Any, *, forgive: bool) -> str | None:
    """Why the tracker ``name`` cannot be used; None if it can.

    Args:
        forgive: return the reason instead of raising if a directory is missing.

    Raises:
        RuntimeMisuse: the tracker needs a directory, and there is none.
    """
    kind = LOGGER_TYPE_TO_CLASS[name]
    if logging_dir is None and kind.requires_logging_directory:
        problem = (
            "needs a logging directory, and none is set. Pass Accelerator(project_dir=...), or submit the script with "
            "hpcaccel"
        )
        if forgive:
            return f"log_with='all' skips {name!r}, which {problem}"
        raise RuntimeMisuse(f"log_with={name!r} {problem}")
    if is_installed(kind):
        return None
    package = kind.packages[0]
    return (
        f"log_with={name!r}: the package {package} is not installed, so this tracker is skipped. "
        f"Install it with: pip install {package}"
    )


def is_installed(kind: type[GeneralTracker]) -> bool:
    """Whether one of the packages that ``kind`` needs is installed. Does not import the package."""
    return not kind.packages or any(map(_is_importable, kind.packages))


def _is_importable(package: str) -> bool:
    spec = find_spec(package)
    # Trackers create directories with their own name in the working directory, which look like namespace packages.
    return spec is not None and spec.origin is not None


def _named(item: Any) -> LoggerType | str:
    name = str(item)
    if not isinstance(item, str) or name not in LOGGER_TYPE_TO_CLASS:
        raise RuntimeMisuse(
            f"log_with={item!r} is not a tracker. Use one of: {', '.join(['all', *LOGGER_TYPE_TO_CLASS])}, or an "
            "instance of a class derived from GeneralTracker"
        )
    return LoggerType(name) if name in _built_in() else name


def _built_in() -> list[str]:
    return [str(name) for name in LoggerType if str(name) != "all"]
