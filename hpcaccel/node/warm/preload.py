"""Imports in a warm parent: the modules that its rank has imported, as far as they are known to be safe.

Rank 0 lists them at its first step (``runtime.training.loaded_modules``). A forked rank would go wrong if a module had
read a variable whose value is another one in the rank, if it had started threads or initialised CUDA, or if it were
another file than the rank's. Each of these is looked for after the imports, and before a fork. Then ranks are new
processes.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["MODULES", "Preload"]

MODULES = (
    "numpy",
    "torch",
    "torch._dynamo",  # imported by an optimizer's first step
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",  # imported by a DTensor's first operation
    "torch.distributed.tensor.parallel",
)
"""Imported for each rank that has loaded torch."""
READ_BY_LIBRARIES = (
    "ATEN_", "BLIS_", "C10_", "DNNL_", "GOMP_", "GOTO_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_",
    "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_",
)  # fmt: skip
"""Prefixes of variables that shared libraries read when they are loaded, which cannot be observed."""


class Preload:
    """What a warm parent imports, and whether its ranks may then be forked.

    Args:
        modules: names in the order of their imports.
        origins: file of each top-level package or module, where the rank has imported it from.
        changed: variables that the rank's program has set, changed or removed before it began to train.
    """

    def __init__(
        self, modules: Sequence[str], *, origins: Mapping[str, str] | None = None, changed: Collection[str] = ()
    ) -> None:
        self._modules = modules
        self._origins = origins or {}
        self._changed = frozenset(changed)
        self._read: dict[str, str | None] = {}
        """Variables that modules have read at their import, with their values."""

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Preload:
        """The imports for a rank with this report, see ``runtime.training.loaded_modules``."""
        names = list(report["modules"])
        more = [name for name in MODULES if "torch" in report["origins"] and name not in names]
        return cls([*names, *more], origins=report["origins"], changed=report["changed"])

    def run(self) -> str:
        """Import the modules. Returns why ranks must not be forked; empty if they may."""
        if early := sorted(name for name in self._changed if name.startswith(READ_BY_LIBRARIES)):
            return f"the program sets {', '.join(early)}"
        threads = threading.active_count()
        with _recording(self._read):
            for name in self._modules:
                try:
                    importlib.import_module(name)
                except ImportError:
                    continue  # an optional module, or not in this version
                except BaseException as error:
                    return f"{name} cannot be imported: {error!r}"  # a rank that imports it reports the error
        gc.collect()
        gc.freeze()  # otherwise collections in a forked rank would visit, and so copy, all of torch's objects
        if threading.active_count() > threads:
            return "an imported module has started threads"
        if early := sorted(self._changed & self._read.keys()):
            return f"the program sets {', '.join(early)}"
        for name, origin in self._origins.items():
            module = sys.modules.get(name)
            if module is not None and getattr(module.__spec__, "origin", None) != origin:
                return f"{name} is another one here than in the ranks"
        return ""

    def suits(self, changes: Mapping[str, str | None]) -> bool:
        """Whether the modules have read no variable that has another value in the next rank.

        Args:
            changes: values of variables in the next rank; None: removed.
        """
        return all(self._read[name] == value for name, value in changes.items() if name in self._read)


@contextmanager
def _recording(read: dict[str, str | None]) -> Iterator[None]:
    """Record the variables that are read by name through ``os.environ`` meanwhile, with their values.

    Not recorded are reads in the order of an iteration: copies of the whole environment, as for child processes.
    """
    kind = type(os.environ)
    get, iterate = kind.__getitem__, kind.__iter__
    iterated: deque[Any] = deque()
    """Keys from iterations that have not been read since."""

    def recorded(self: Any, key: Any) -> Any:
        if iterated and iterated[0] == key:
            iterated.popleft()
            return get(self, key)
        try:
            value = get(self, key)
        except KeyError:
            read.setdefault(os.fsdecode(key), None)
            raise
        read.setdefault(os.fsdecode(key), os.fsdecode(value))
        return value

    def observed(self: Any) -> Iterator[Any]:
        iterated.clear()
        for key in iterate(self):
            iterated.append(key)
            yield key

    kind.__getitem__, kind.__iter__ = recorded, observed  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__getitem__, kind.__iter__ = get, iterate  # type: ignore[method-assign]
