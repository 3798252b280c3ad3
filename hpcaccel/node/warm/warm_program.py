"""How a forked process becomes the user's program, with ``__main__``, ``sys`` and exit as in a new Python process.

The program's command line is ``python SCRIPT``, ``python -m MODULE`` or ``python -c TEXT``, with arguments.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import BuiltinImporter, SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

__all__ = ["become", "set_first_path"]

ARGUMENT_FIELDS = slice(45, 47)
"""``arg_start`` and ``arg_end`` among the fields of /proc/self/stat after the program's name, see proc(5)."""


def _first_path(words: list[str]) -> str:
    """The first entry of ``sys.path`` in a process with the command line ``python WORDS``."""
    if words[0] == "-m":
        return os.getcwd()
    return "" if words[0] == "-c" else os.path.dirname(os.path.realpath(words[0]))


def set_first_path(words: list[str]) -> None:
    """Set the first entry of ``sys.path``, which is still that of this process's command line, ``python -c TEXT``."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = _first_path(words)


def become(words: list[str], python: str) -> None:
    """Run the program with the command line ``python WORDS``. The caller then returns, so that the interpreter exits.

    Raises:
        SystemExit: as the program does, or with 1 after an exception, whose traceback has been printed.
        KeyboardInterrupt: as the program does. The traceback has been printed.
    """
    set_first_path(words)
    sys.path_importer_cache.clear()  # the parent may have read these folders before the latest changes to them
    sys.orig_argv[:] = [python, *words]
    _show_command(sys.orig_argv)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # Python's own generator is seeded anew after a fork, torch's is constant
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    option = words[0] if words[0] in ("-m", "-c") else ""
    sys.argv[:] = [option, *words[2:]] if option else words
    if option == "-m":
        _run(lambda: runpy._run_module_as_main(words[1]))  # type: ignore[attr-defined]
    elif option == "-c":
        main.__loader__ = BuiltinImporter
        _run(lambda: exec(compile(words[1], "<string>", "exec", dont_inherit=True), main.__dict__))
    else:
        _run(lambda: _exec_script(words[0], main))


def _exec_script(path: str, main: ModuleType) -> None:
    main.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
    if sys.version_info < (3, 15):
        main.__dict__["__cached__"] = None
    with open(path, "rb") as file:
        text = file.read()
    exec(compile(text, path, "exec", dont_inherit=True), main.__dict__)


def _run(work: Callable[[], Any]) -> None:
    """Call ``work``. Report an exception as the interpreter does, without the frames of this file."""
    try:
        work()
    except SystemExit:
        raise
    except BaseException as error:
        failure = error
    else:
        return
    trace: TracebackType | None = failure.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == _run.__code__.co_filename:
        trace = trace.tb_next
    failure.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(failure), failure, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = failure
    try:
        sys.excepthook(type(failure), failure, trace)
    except SystemExit:
        raise
    except BaseException as error:
        own = error.__traceback__
        error.__traceback__ = None if own is None else own.tb_next
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(failure), failure, trace)
    if isinstance(failure, KeyboardInterrupt):
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt  # the interpreter ends the process by SIGINT
    raise SystemExit(1)


def _show_command(words: list[str]) -> None:
    """Show the program's command line in process lists, as far as there is room: this process has its parent's."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            start, end = map(int, file.read().rpartition(")")[2].split()[ARGUMENT_FIELDS])
        text = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
    except (OSError, ValueError):
        pass
