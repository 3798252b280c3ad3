"""Imports in a warm parent: the modules that its rank has imported, as far as they are known to be safe.

Rank 0 lists them at its first step (``runtime.training.loaded_modules``). A forked rank would go wrong if a module had
read a variable whose value is another one in the rank, if it had started threads or processes or opened a device, if it
were another file than the rank's, or if its file had changed since. Each of these is looked for after the imports or
before a fork. Then ranks are new processes.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hpcaccel.node.warm.descendants import has_device, of_own_session

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
SITES = ("site-packages", "dist-packages")
"""Folders of installed packages."""


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
        self._files: dict[str, tuple[int, int] | None] = {}
        """Files of the modules and folders of installed packages, see ``_state``."""

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
        if "numpy" in self._modules:
            importlib.import_module("numpy")  # OpenBLAS starts threads, but ends them before a fork
        threads, processes = _threads(), of_own_session()
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
        self._files = {path: _state(path) for path in _sources()}
        if _threads() > threads:
            return "an imported module has started threads"
        if of_own_session() - processes:
            return "an imported module has started processes"
        if has_device():
            return "an imported module has opened a device"
        if early := sorted(self._changed & self._read.keys()):
            return f"the program sets {', '.join(early)}"
        for name, origin in self._origins.items():
            module = sys.modules.get(name)
            if module is not None and getattr(module.__spec__, "origin", None) != origin:
                return f"{name} is another one here than in the ranks"
        return ""

    def why_not(self, changes: Mapping[str, str | None]) -> str:
        """Why the next rank must be a new process although the modules have been imported; empty if it may be forked.

        Args:
            changes: values of variables in the next rank; None: removed.
        """
        for name, value in changes.items():
            if name in self._read and self._read[name] != value:
                return f"{name}, which a module has read, has another value now"
        return next((f"{path} has changed" for path, state in self._files.items() if _state(path) != state), "")


def _threads() -> int:
    """The number of this process's threads, including those that Python does not know."""
    return len(os.listdir("/proc/self/task"))


def _sources() -> Iterator[str]:
    """The files of all imported modules, and the folders of installed packages: a file ``.pth`` that is added there
    changes ``sys.path`` in new processes."""
    for module in list(sys.modules.values()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if isinstance(origin, str) and os.path.isabs(origin):
            yield origin
    yield from (path for path in sys.path if os.path.basename(path) in SITES)


def _state(path: str) -> tuple[int, int] | None:
    """Size and modification time of a file; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


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
