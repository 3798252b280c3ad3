from __future__ import annotations

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.spec import grid


def test_grid_gives_every_combination_of_values(load) -> None:
    combinations = grid(["args.lr=1e-3,3e-4", "seed=1,2", "args.l=[1,2],'a,b'"])
    assert len(combinations) == 8
    assert combinations[0] == ["args.lr=1e-3", "seed=1", "args.l=[1,2]"]
    assert combinations[1] == ["args.lr=1e-3", "seed=1", "args.l='a,b'"]
    assert combinations[-1] == ["args.lr=3e-4", "seed=2", "args.l='a,b'"]
    assert load("", *combinations[-1]).arguments() == ["--lr", "3e-4", "--l", "a,b"]


@pytest.mark.parametrize(
    ("axes", "problem"),
    [
        (["lr"], "command line: --grid lr: write key=a,b,c, such as args.lr=1e-3,3e-4"),
        (["seed=1,,2"], "command line: --grid seed=1,,2: a value is empty (write '' for an empty string)"),
        (["seed=1", "runtime.seed=2"], "command line: --grid runtime.seed=2: seed is already an axis"),
        (["sede=1"], "command line: --grid sede=1: sede is not a known key. Did you mean 'runtime.seed'?"),
    ],
)
def test_invalid_grid_axis_is_refused(axes: list[str], problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        grid(axes)
    assert caught.value.problems == [problem]
