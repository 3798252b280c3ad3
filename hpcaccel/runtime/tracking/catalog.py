"""Which trackers there are, and which of them can work here."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.enums import LoggerType
from hpcaccel.runtime.tracking.aim import AimTracker
from hpcaccel.runtime.tracking.clearml import ClearMLTracker
from hpcaccel.runtime.tracking.comet import CometMLTracker
from hpcaccel.runtime.tracking.dvclive import DVCLiveTracker
from hpcaccel.runtime.tracking.general_tracker import GeneralTracker
from hpcaccel.runtime.tracking.mlflow import MLflowTracker
from hpcaccel.runtime.tracking.swanlab import SwanLabTracker
from hpcaccel.runtime.tracking.tensorboard import TensorBoardTracker
from hpcaccel.runtime.tracking.trackio import TrackioTracker
from hpcaccel.runtime.tracking.wandb import WandBTracker

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
    """Make a class of the script's own known by its ``name``, for ``log_with``. It is made with the project's name,
    then, where it ``requires_logging_directory``, the directory, then the keywords of ``init_kwargs[name]``.

    Raises:
        RuntimeMisuse: no class of trackers, or one without ``name`` or ``requires_logging_directory``.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise RuntimeMisuse(f"register_tracker_class({tracker_class!r}): this is no class made from GeneralTracker")
    if not getattr(tracker_class, "name", None) or not hasattr(tracker_class, "requires_logging_directory"):
        raise RuntimeMisuse(
            f"register_tracker_class({tracker_class.__name__}): the class needs a name and "
            "requires_logging_directory (True or False)"
        )
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"the tracker {tracker_class.name!r} was {LOGGER_TYPE_TO_CLASS[tracker_class.name].__name__} and is "
            f"{tracker_class.__name__} now",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def get_available_trackers() -> list[LoggerType]:
    """The trackers of ``LoggerType`` whose packages are installed."""
    return [LoggerType(name) for name in _built_in() if is_installed(LOGGER_TYPE_TO_CLASS[name])]


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[Wanted]:
    """The trackers that can work here; a warning speaks of each of the others. See ``sort_out``."""
    usable, unusable = sort_out(log_with, logging_dir)
    for why in unusable.values():
        warnings.warn(why, stacklevel=2)
    return usable


def sort_out(log_with: Any, logging_dir: Any = None) -> tuple[list[Wanted], dict[str, str]]:
    """Of the trackers that are wanted those that can work here, each once, and why the others cannot, by name.

    Args:
        log_with: names, members of ``LoggerType``, trackers, or a list of these; ``all``: whatever is installed.
        logging_dir: where trackers may write; None: nowhere.

    Raises:
        RuntimeMisuse: a name that nobody knows, an object that is no tracker, or a tracker that needs a directory
            where there is none.
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
    """Why the tracker ``name`` cannot work here.

    Raises:
        RuntimeMisuse: it needs a directory that it was not given, unless that is to be forgiven.
    """
    kind = LOGGER_TYPE_TO_CLASS[name]
    if logging_dir is None and kind.requires_logging_directory:
        why = (
            f"log_with={name!r} writes into a directory, and there is none. Give Accelerator(project_dir=...), or "
            "submit the script with hpcaccel"
        )
        if forgive:
            return f"{why}. It is left out of 'all'"
        raise RuntimeMisuse(why)
    if is_installed(kind):
        return None
    package = kind.packages[0]
    return (
        f"log_with={name!r}: the package {package} is not installed, so this tracker is left out. "
        f"pip install {package} brings it"
    )


def is_installed(kind: type[GeneralTracker]) -> bool:
    """Whether one of the packages that ``kind`` needs can be imported; none of them is."""
    return not kind.packages or any(map(_is_importable, kind.packages))


def _is_importable(package: str) -> bool:
    spec = find_spec(package)
    # Trackers leave directories of their own name behind, which look like packages without any file.
    return spec is not None and spec.origin is not None


def _named(item: Any) -> LoggerType | str:
    name = str(item)
    if not isinstance(item, str) or name not in LOGGER_TYPE_TO_CLASS:
        raise RuntimeMisuse(
            f"log_with={item!r} is no tracker. Known are: {', '.join(['all', *LOGGER_TYPE_TO_CLASS])}, and objects "
            "made from GeneralTracker"
        )
    return LoggerType(name) if name in _built_in() else name


def _built_in() -> list[str]:
    return [str(name) for name in LoggerType if str(name) != "all"]
