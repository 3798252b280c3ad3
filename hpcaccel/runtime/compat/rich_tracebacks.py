"""Importing this module makes rich print the tracebacks of uncaught errors, as importing ``accelerate.rich`` does."""

from __future__ import annotations

from typing import Any

__all__ = ["install"]


def install(**options: Any) -> Any:
    """``rich.traceback.install``.

    Raises:
        ModuleNotFoundError: rich is not installed.
    """
    try:
        from rich.traceback import install as install_in_rich
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("hpcaccel.rich needs rich: pip install rich", name=error.name) from None
    return install_in_rich(**options)


install(show_locals=False)
