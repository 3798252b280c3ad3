"""Restricted unpickler for checkpoints of other programs: it imports and runs nothing that the file names.

Loading a pickle imports and calls the functions and classes that it names. Here every name is looked up in a table of
harmless replacements; a name that is not in the table raises an error.
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
    """Replacement for an object. ``values`` are the constructor's arguments. If the pickled state is a dict, its
    items become attributes; any other state is stored as ``state``."""

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
    """The value in a pickle file.

    Args:
        names: replacements for classes and functions, by ``module.name``.

    Raises:
        Damaged: the file is missing, refers to any other class or function, or is not a complete pickle.
    """
    try:
        with path.open("rb") as file:
            return _Unpickler(file, names).load()
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except _Refused as refused:
        raise Damaged(
            f"{path} refers to {refused}, which no checkpoint needs. The file was not loaded, and no code in it ran"
        ) from None
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise any error
        raise Damaged(f"{path} is damaged: it is not a complete pickle ({type(error).__name__}: {error})") from None
