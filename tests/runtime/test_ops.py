"""Collective operations on 1, 2 and 4 ranks."""

from __future__ import annotations

import ast

import pytest

from tests.runtime.ranks import PROGRAMS, run_ranks

pytestmark = pytest.mark.torch

PROGRAM = "together.py"


def _cases() -> list[str]:
    tree = ast.parse((PROGRAMS / PROGRAM).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    assert isinstance(found.value, ast.List)
    return [item.id for item in found.value.elts if isinstance(item, ast.Name)]


CASES = _cases()


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.chaos), 4], ids=lambda size: f"{size}-ranks"
)
def results(request: pytest.FixtureRequest) -> dict[str, str]:
    """The results of all cases from one start of the ranks, which takes longer than the cases."""
    ended = run_ranks(PROGRAM, size=request.param)
    found: dict[str, str] = ended.result()
    failed = [name for name, said in found.items() if said != "ok"]
    if any(ended.codes) and not failed:
        pytest.fail("\n".join(ended.outputs))
    return found


@pytest.mark.parametrize("case", CASES)
def test_collective_case_passes(results: dict[str, str], case: str) -> None:
    assert results.get(case, "another case has failed before") == "ok"


def test_program_runs_every_case_it_defines() -> None:
    tree = ast.parse((PROGRAMS / PROGRAM).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert {node.name for node in functions} - {"ranks"} == set(CASES)
