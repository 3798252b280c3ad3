"""What submitit pickles: small importable objects that hold a path, never a model or something from ``__main__``.

This module is imported by the ranks of a callable, so it needs nothing beyond the standard library and submitit.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel.core.records import EXIT_CONTINUED
from hpcaccel.errors import HpcaccelError, UserError

__all__ = ["FUNCTION_FILE", "CallFailed", "FunctionCall", "ItemCall", "ProgramStub", "pickle_function", "said_in"]

FUNCTION_FILE = "function.pkl"


@dataclass(frozen=True)
class FunctionCall:
    """Calls the function that lies pickled at ``path``, with what was copied to ``code`` importable before all else."""

    path: str
    code: str | None

    def __call__(self) -> Any:
        _give_signals_back()
        _forget_torn_result()
        if self.code is not None:
            # `python -m` puts the working directory first, where the code may have changed since it was submitted.
            sys.path.insert(0, self.code)
        function, args, kwargs = pickle.loads(Path(self.path).read_bytes())  # noqa: S301 - our own file
        try:
            value = function(*args, **kwargs)
        except SystemExit as end:
            if end.code in (None, 0):
                return None
            if end.code == EXIT_CONTINUED:
                raise  # the runtime's own: it has saved, and goes on another time
            raise CallFailed(
                f"the function called sys.exit({end.code!r}); return a value, or raise an exception that says why"
            ) from None
        _check_result(value)
        return value


class ItemCall:
    """Calls a function with the arguments that are this task's, by the number of the task."""

    def __init__(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> None:
        self.__wrapped__ = function  # whose file is copied
        self.__qualname__ = getattr(function, "__qualname__", "call")
        self._calls = calls

    def __call__(self) -> Any:
        number = int(Path(os.environ["HPCACCEL_RUN_DIR"]).name)  # <array>/tasks/<number>
        return self.__wrapped__(*self._calls[number])


class CallFailed(HpcaccelError):
    """A function ended in a way that gives no result; its message says all there is to say."""


def said_in(trace: str) -> str | None:
    """The sentence of a ``CallFailed`` at the end of a rank's traceback; None: it ends in another exception."""
    _, found, sentence = str(trace).rstrip().rpartition(f"{CallFailed.__module__}.{CallFailed.__name__}: ")
    return " ".join(sentence.split()) if found else None


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


def _check_result(value: Any) -> None:
    """Raises CallFailed for what submitit could not write."""
    import cloudpickle

    try:
        cloudpickle.CloudPickler(_Nowhere()).dump(value)
    except Exception as error:  # pickling runs code of the user's objects: anything may come
        raise CallFailed(
            f"the function returned {type(value).__name__}, which cannot be pickled ({error}); return plain values, "
            "or write a file and return its path"
        ) from None


@dataclass(frozen=True)
class ProgramStub:
    """Stands for a script or command, which the ranks start by themselves."""

    run_directory: str

    def __call__(self) -> None:
        raise HpcaccelError(f"the ranks of {self.run_directory} run its program, not this pickle")


def pickle_function(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Raises UserError when the function or one of its arguments cannot be pickled."""
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps((function, args, kwargs))
    except Exception as error:  # pickling runs code of the user's objects: anything may come
        raise UserError(
            f"cannot pickle {getattr(function, '__qualname__', function)!r} with its arguments: {error}. "
            "Hand in paths and plain values, and build models and data inside of the function"
        ) from error
    return data


def _give_signals_back() -> None:
    """Take submitit's handlers out: they ignore SIGTERM, requeue by themselves, and every forked child has them."""
    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


def _forget_torn_result() -> None:
    """An attempt that was killed while it wrote its result leaves a file that submitit would stumble over."""
    from submitit import JobEnvironment

    result = JobEnvironment().paths.result_pickle
    result.with_suffix(result.suffix + ".save_tmp").unlink(missing_ok=True)
