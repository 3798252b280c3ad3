"""Callables that are pickled into a run directory: the calls of Python functions, and a placeholder for programs.

submitit's own pickles contain paths only; the user's function is pickled in a separate file. The ranks of a Python
function import this module, so besides hpcaccel's base it needs only submitit and cloudpickle.
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

from hpcaccel.core.rank_protocol import EXIT_CONTINUED
from hpcaccel.errors import HpcaccelError, UserError

__all__ = ["FUNCTION_FILE", "CallFailed", "FunctionCall", "ItemCall", "ProgramStub", "call_failure", "pickle_function"]

FUNCTION_FILE = "function.pkl"


@dataclass(frozen=True)
class FunctionCall:
    """Calls the function pickled in the file ``path``, with the folder of the copied code first on ``sys.path``."""

    path: str
    code: str | None

    def __call__(self) -> Any:
        _reset_signals()
        _remove_torn_result()
        if self.code is not None:
            # `python -m` puts the working directory first, but the code there may have changed since the submission.
            sys.path.insert(0, self.code)
        function, args, kwargs = pickle.loads(Path(self.path).read_bytes())  # noqa: S301 - our own file
        try:
            value = function(*args, **kwargs)
        except SystemExit as end:
            if end.code in (None, 0):
                return None
            if end.code == EXIT_CONTINUED:
                raise  # the runtime has saved, and the run continues in a later attempt
            raise CallFailed(
                f"the function called sys.exit({end.code!r}). Return a value, or raise an exception with the reason"
            ) from None
        _check_result(value)
        return value


class ItemCall:
    """Calls the function with the arguments ``calls[n]``, where n is the index of this task in its array."""

    def __init__(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> None:
        self.__wrapped__ = function  # lets inspect.unwrap() find the user's function, whose file is copied
        self.__qualname__ = getattr(function, "__qualname__", "call")
        self._calls = calls

    def __call__(self) -> Any:
        number = int(Path(os.environ["HPCACCEL_RUN_DIR"]).name)  # <array>/tasks/<number>
        return self.__wrapped__(*self._calls[number])


class CallFailed(HpcaccelError):
    """A function ended without a usable result. The message is complete without a traceback."""


def call_failure(trace: str) -> str | None:
    """The message of the last ``CallFailed`` in a rank's traceback; None if there is none."""
    _, found, sentence = str(trace).rstrip().rpartition(f"{CallFailed.__module__}.{CallFailed.__name__}: ")
    return " ".join(sentence.split()) if found else None


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


def _check_result(value: Any) -> None:
    """Raises CallFailed if ``value`` cannot be pickled."""
    import cloudpickle

    try:
        cloudpickle.CloudPickler(_Nowhere()).dump(value)
    except Exception as error:  # pickling runs the user's code, which may raise anything
        raise CallFailed(
            f"the function returned an object of type {type(value).__name__}, which cannot be pickled: {error}. Return "
            "plain values, or write a file and return its path"
        ) from None


@dataclass(frozen=True)
class ProgramStub:
    """A placeholder for a script or command, which the ranks start without submitit."""

    run_directory: str

    def __call__(self) -> None:
        raise HpcaccelError(
            f"the pickle in {self.run_directory} is a placeholder for submitit: the ranks start the program directly"
        )


def pickle_function(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call. Raises UserError if the function or one of its arguments cannot be pickled."""
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps((function, args, kwargs))
    except Exception as error:  # pickling runs the user's code, which may raise anything
        raise UserError(
            f"cannot pickle {getattr(function, '__qualname__', function)!r} and its arguments: {error}. "
            "Pass paths and plain values, and create models and datasets inside the function"
        ) from error
    return data


def _reset_signals() -> None:
    """Remove submitit's signal handlers: they ignore SIGTERM, requeue jobs, and are inherited by forked children."""
    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


def _remove_torn_result() -> None:
    """Delete the temporary result file of an attempt that was killed: submitit fails if such a file exists."""
    from submitit import JobEnvironment

    result = JobEnvironment().paths.result_pickle
    result.with_suffix(result.suffix + ".save_tmp").unlink(missing_ok=True)
