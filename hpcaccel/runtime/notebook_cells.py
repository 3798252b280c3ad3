"""Finds the notebook cell that made a call, for error messages. Outside of a notebook, nothing is found."""

from __future__ import annotations

import ast
import linecache
import os
import re
from collections.abc import Callable, Iterator, Sequence

from hpcaccel.core.notebook import notebook_shell

__all__ = ["cells_that_call", "cells_that_use_a_gpu", "place_in_cell", "with_cell_names"]

_LONGEST_SOURCE = 80
"""Maximum number of characters of a source line in a message."""
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')


def place_in_cell(stack: Sequence[str]) -> str | None:
    """The innermost frame of ``stack`` that is in a cell, as ``cell [3], line 2 (`accelerator = Accelerator()`)``.

    Args:
        stack: ``file:line`` of each frame, innermost first.
    """
    for place in stack:
        path, _, line = place.rpartition(":")
        path = os.path.abspath(path)
        if (cell := _cell_of(path)) is not None:
            source = linecache.getline(path, int(line)).strip()
            source = source if len(source) <= _LONGEST_SOURCE else f"{source[: _LONGEST_SOURCE - 1]}…"
            return f"cell {cell}, line {line}" + (f" (`{source}`)" if source else "")
    return None


def with_cell_names(traceback: str) -> str:
    """``traceback`` with ``Cell In[3], line 2`` instead of the name that IPython gives a cell's temporary file."""

    def named(frame: re.Match[str]) -> str:
        cell = _cell_of(frame[1])
        return frame[0] if cell is None else f"Cell In{cell}, line {frame[2]}"

    return _FRAME.sub(named, traceback)


def _cell_of(path: str) -> str | None:
    """The number of the cell whose code IPython compiled under the name ``path``, as ``[3]``."""
    shell = notebook_shell()
    name = getattr(getattr(shell, "compile", None), "format_code_name", lambda path: None)(path)
    return name[1].removeprefix("In") if name is not None and name[1].startswith("In[") else None


def cells_that_call(function: str) -> str:
    """The executed cells that call ``function`` outside of function definitions, as ``cell [3]`` or ``cells [3], [4]``;
    empty if there are none."""

    def calls(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == function

    return _listed(calls)


_KINDS = ("cuda", "xpu")
_HARMLESS = {"is_available", "is_initialized", "device_count", "is_bf16_supported", "Stream", "Event", "amp"}
"""Attributes of ``torch.cuda`` and ``torch.xpu`` whose use in a cell does not initialise a GPU."""


def cells_that_use_a_gpu() -> str:
    """The executed cells that seem to use a GPU outside of function definitions, as ``cell [3]`` or ``cells [3], [4]``;
    empty if there are none. A use inside of a function that a cell calls is not found."""
    devices: set[str] = set()
    """Variables that hold a GPU's name or device."""

    def is_gpu(node: ast.AST) -> bool:
        parts = list(ast.walk(node))
        texts = (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        return any(text.partition(":")[0] in _KINDS for text in texts) or bool(names & devices)

    def uses(node: ast.AST) -> bool:
        if isinstance(node, ast.Assign) and is_gpu(node.value):
            devices.update(target.id for target in node.targets if isinstance(target, ast.Name))
        if not isinstance(node, ast.Call):
            return False
        name = ast.unparse(node.func)
        values = [word.value for word in node.keywords if word.arg in ("device", "device_map")]
        if name.endswith(".to"):
            values += node.args
        return (
            name.endswith(tuple(f".{kind}" for kind in _KINDS))
            or (name.startswith(tuple(f"torch.{kind}." for kind in _KINDS)) and name.split(".")[2] not in _HARMLESS)
            or any(is_gpu(value) for value in values)
        )

    return _listed(uses)


def _listed(wanted: Callable[[ast.AST], bool]) -> str:
    # sum() visits every node, and any() would not: the search for GPUs collects the names of variables.
    numbers = [number for number, tree in _executed_cells() if sum(map(wanted, _at_top_level(tree)))]
    cells = ", ".join(f"[{number}]" for number in numbers)
    return f"{'cell' if len(numbers) == 1 else 'cells'} {cells}" if numbers else ""


def _executed_cells() -> Iterator[tuple[int, ast.Module]]:
    shell = notebook_shell()
    for number, source in enumerate(getattr(shell, "user_ns", {}).get("In", ())):
        try:
            yield number, ast.parse(source)
        except (SyntaxError, ValueError):
            pass  # the cell failed to compile, so it did nothing


def _at_top_level(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and its descendants in source order, without the bodies of functions: these may run in the ranks."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _at_top_level(child)
