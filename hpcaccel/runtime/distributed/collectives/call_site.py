"""Locations (``file:line``) in the user's script: of the current call, of a frame, of a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import FrameType, TracebackType

import hpcaccel

__all__ = ["call_site", "call_stack", "script_frame", "site_of", "site_of_frame"]

_torch = find_spec("torch")  # torch itself is not imported: a single process may not need it
_LIBRARY_PATHS = (
    os.path.dirname(hpcaccel.__file__) + os.sep,
    *([] if _torch is None or _torch.origin is None else [os.path.dirname(_torch.origin) + os.sep]),
    os.path.dirname(os.__file__) + os.sep + "contextlib.py",
    os.path.dirname(os.__file__) + os.sep + "functools.py",
    "<frozen",
)
"""Path prefixes of files that do not belong to the script."""


def call_site() -> str:
    """``file:line`` of the current call in the script: the innermost frame outside hpcaccel, torch, contextlib,
    functools and frozen modules."""
    return next(_script_frames(sys._getframe(1)), "an unknown location")


def script_frame() -> FrameType | None:
    """The frame that ``call_site`` describes."""
    return next(_frames_of_script(sys._getframe(1)), None)


def call_stack() -> list[str]:
    """``file:line`` of all frames of the script, innermost first."""
    return list(_script_frames(sys._getframe(1)))


def site_of_frame(frame: FrameType | None) -> str:
    """``file:line`` of the script's innermost frame among ``frame`` and its callers."""
    return next(_script_frames(frame), "an unknown location")


def site_of(traceback: TracebackType | None) -> str:
    """``file:line`` of the script's innermost frame in an exception's traceback."""
    found = "an unknown location"
    while traceback is not None:
        path = traceback.tb_frame.f_code.co_filename
        if not path.startswith(_LIBRARY_PATHS):
            found = f"{_short(path)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def _script_frames(frame: FrameType | None) -> Iterator[str]:
    return (f"{_short(found.f_code.co_filename)}:{found.f_lineno}" for found in _frames_of_script(frame))


def _frames_of_script(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARY_PATHS):
            yield frame
        frame = frame.f_back


def _short(path: str) -> str:
    """``path``, made relative if the file is below the working directory."""
    here = os.getcwd() + os.sep
    return path[len(here) :] if path.startswith(here) else path
