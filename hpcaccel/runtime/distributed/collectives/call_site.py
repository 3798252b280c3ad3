"""Where in the user's script a call came from."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch

import hpcaccel

__all__ = ["call_site", "call_stack", "site_of", "site_of_frame"]

_NOT_THE_SCRIPT = (
    os.path.dirname(hpcaccel.__file__) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.__file__) + os.sep + "contextlib.py",
    os.path.dirname(os.__file__) + os.sep + "functools.py",
    "<frozen",
)


def call_site() -> str:
    """``file:line`` of the innermost call that is neither hpcaccel's nor torch's."""
    return next(_script_frames(sys._getframe(1)), "an unknown place")


def call_stack() -> list[str]:
    """``file:line`` of all these calls, the innermost first."""
    return list(_script_frames(sys._getframe(1)))


def site_of_frame(frame: FrameType | None) -> str:
    """``file:line`` of the innermost call of the script that led to ``frame``."""
    return next(_script_frames(frame), "an unknown place")


def site_of(traceback: TracebackType | None) -> str:
    """``file:line`` of the script where an exception passed last, on its way out of whatever the script called."""
    found = "an unknown place"
    while traceback is not None:
        path = traceback.tb_frame.f_code.co_filename
        if not path.startswith(_NOT_THE_SCRIPT):
            found = f"{_short(path)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def _script_frames(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_NOT_THE_SCRIPT):
            yield f"{_short(path)}:{frame.f_lineno}"
        frame = frame.f_back


def _short(path: str) -> str:
    """Relative to the working directory where it lies below it."""
    here = os.getcwd() + os.sep
    return path[len(here) :] if path.startswith(here) else path
