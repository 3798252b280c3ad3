"""Import of pydantic without what hpcaccel does not use: pydantic's plugins, and ``importlib.metadata`` to find them.

Looking for plugins reads the metadata of each installed package, and ``importlib.metadata`` imports thirty modules,
among them those of e-mail and ZIP: on a cold shared file system both take seconds.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

__all__ = ["without_plugins"]

_SWITCH = "PYDANTIC_DISABLE_PLUGINS"
_METADATA = "importlib.metadata"


@contextmanager
def without_plugins() -> Iterator[None]:
    """Keep pydantic from looking for plugins while it builds models in the block."""
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "__all__"
    try:
        _import_loader()
        yield
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before


def _import_loader() -> None:
    """Import pydantic's loader of plugins. Its ``entry_points`` imports ``importlib.metadata`` when it is called."""
    if _METADATA in sys.modules:
        return
    sys.modules[_METADATA] = _Postponed(_METADATA)
    try:
        with suppress(ImportError):
            import pydantic.plugin._loader  # noqa: F401
    finally:
        if isinstance(sys.modules.get(_METADATA), _Postponed):
            del sys.modules[_METADATA]


class _Postponed(ModuleType):
    """Stands for ``importlib.metadata`` while another module takes ``entry_points`` from it. Any other name imports the
    module itself."""

    def __getattr__(self, name: str) -> Any:
        if name == "entry_points":
            return _entry_points
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(_METADATA) is self:
            del sys.modules[_METADATA]
        import importlib.metadata

        return getattr(importlib.metadata, name)


def _entry_points(**selection: Any) -> Any:
    from importlib.metadata import entry_points

    return entry_points(**selection)
