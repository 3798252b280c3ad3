"""Adds hpcaccel's callback to every ``transformers.Trainer`` of a program, without changing a line of the program.

Python imports this file at startup in the ranks of a run with ``runtime.bridge: transformers``. When
``transformers.trainer`` is imported, this file calls ``hpcaccel.integrations.transformers.add_to_every_trainer``. This
file also imports the environment's own ``sitecustomize``, if there is one.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TRAINER = "transformers.trainer"


class TrainerFinder(MetaPathFinder):
    """Finds ``transformers.trainer`` as the other finders do, and wraps its loader in a ``TrainerLoader``."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TRAINER or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = TrainerLoader(spec.loader)
        return spec


class TrainerLoader(Loader):
    """Executes a module with ``loader``, then adds the callback."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            from hpcaccel.integrations.transformers import add_to_every_trainer
        except ModuleNotFoundError as error:
            if error.name != "hpcaccel":
                raise
            raise ImportError(
                "runtime.bridge: transformers needs hpcaccel in the Python environment of the ranks: install it there, "
                "or remove runtime.bridge"
            ) from None
        add_to_every_trainer()


def _import_own_sitecustomize() -> None:
    here, ours = os.path.dirname(os.path.abspath(__file__)), sys.modules.pop("sitecustomize", None)
    before = list(sys.path)
    sys.path[:] = [place for place in before if os.path.abspath(place) != here]
    try:
        __import__("sitecustomize")  # the environment's own
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.path[:] = before
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, TrainerFinder())
    _import_own_sitecustomize()
