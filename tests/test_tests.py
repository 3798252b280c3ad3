"""Every test asserts something: itself, or through a helper of the tests that does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
EXPECTATIONS = ("raises", "warns", "fail", "importorskip")
VERBS = ("assert", "check", "expect")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def asserts(function: Function) -> bool:
    """Whether its own body has an assertion, pytest.raises or the like, or a call of ``assert_…``, ``check_…``."""
    nodes = list(ast.walk(function))
    named = [name for name in called(function) if name in EXPECTATIONS or name.lstrip("_").startswith(VERBS)]
    return bool(named) or any(isinstance(node, ast.Assert) for node in nodes)


def called(function: Function) -> set[str]:
    """Last parts of the names of the functions that it calls."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return {ast.unparse(call.func).rpartition(".")[2] for call in calls}


def test_every_test_asserts_something() -> None:
    files = [path for path in TESTS.rglob("*.py") if "data" not in path.relative_to(TESTS).parts]
    trees = {path: ast.parse(path.read_text()) for path in files}
    helpers = {
        one.name
        for tree in trees.values()
        for one in functions(tree)
        if not one.name.startswith("test_") and asserts(one)
    }
    idle = [
        f"{path.relative_to(TESTS)}: {one.name}"
        for path, tree in sorted(trees.items())
        for one in functions(tree)
        if path.name.startswith("test_") and one.name.startswith("test_") and not asserts(one)
        if not called(one) & helpers
    ]
    assert not idle, "these tests assert nothing: " + ", ".join(idle)
