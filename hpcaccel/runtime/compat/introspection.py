"""Looking into objects: their names, attributes of attributes, dictionaries in dictionaries."""

from __future__ import annotations

import sys
from functools import reduce
from typing import Any

__all__ = ["are_libraries_initialized", "get_pretty_name", "merge_dicts", "recursive_getattr"]


def recursive_getattr(obj: Any, attr: str) -> Any:
    """``obj.a.b.c`` for ``"a.b.c"``."""
    return reduce(getattr, attr.split("."), obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """``destination``, with what ``source`` holds put into it, at every depth."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def get_pretty_name(obj: Any) -> str:
    """The name of a class or a function, or that of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of the libraries that this process has imported."""
    return [name for name in library_names if name in sys.modules]
