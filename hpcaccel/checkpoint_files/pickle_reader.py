"""Reading the pickle of a foreign checkpoint without running anything that is in it.

A pickle names functions and classes, and loading it calls them. Here every name is looked up in a table of harmless
stand-ins and nowhere else; a name that is not in the table ends the reading. Nothing is imported, torch neither.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcaccel.errors import Damaged

__all__ = ["Record", "read_pickle"]


class Record:
    """Stands for an object of a class that only holds values: they become its attributes, or its ``state``."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _Refused(pickle.UnpicklingError):
    pass


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, names: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._names = {"collections.OrderedDict": OrderedDict, "builtins.set": set, **names}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[f"{module}.{name}"]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


def read_pickle(path: Path, names: Mapping[str, Any]) -> Any:
    """What ``path`` holds, its classes and functions replaced by those of ``names`` (``module.name``).

    Raises:
        Damaged: it names something else, or is no whole pickle.
    """
    try:
        with path.open("rb") as file:
            return _Unpickler(file, names).load()
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except _Refused as refused:
        raise Damaged(
            f"{path} asks for {refused}, which no checkpoint needs: nothing of it was run, and it is not opened"
        ) from None
    except OSError:
        raise
    except Exception as error:  # flipped bits make a pickle fail in any way whatsoever
        raise Damaged(f"{path} is damaged: it is no whole pickle ({type(error).__name__}: {error})") from None
