"""The rows of the table of names: functions that raise if a name does not behave as it must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hpcaccel import Accelerator

ROWS: dict[str, Callable[[Path], None]] = {}

_made: list[Accelerator] = []


def row(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def add(check: Callable[[Path], None]) -> Callable[[Path], None]:
        assert name not in ROWS, name
        ROWS[name] = check
        return check

    return add


def start(**words: Any) -> Accelerator:
    """A new Accelerator on the CPU, ended after the row."""
    accelerator = Accelerator(cpu=True, **words)
    _made.append(accelerator)
    return accelerator


def end_all() -> None:
    while _made:
        _made.pop().end_training()


def anew(**words: Any) -> Accelerator:
    """End all Accelerators of the row, then start a new one."""
    end_all()
    return start(**words)


class Numbers(Dataset[torch.Tensor]):
    """0, 1, 2, … as float tensors; ``reads`` counts how many this process took."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.reads = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.tensor(float(index))


def numbers(count: int, batch_size: int, **words: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(count), batch_size=batch_size, **words)


def lists(loader: Any) -> list[list[int]]:
    return [[int(value) for value in batch] for batch in loader]


def linear(weight: float = 1.0) -> torch.nn.Linear:
    """y = weight * x."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)
    return model


def weight_of(accelerator: Accelerator, model: Any) -> float:
    return accelerator.unwrap_model(model).weight.item()


def same(found: Any, expected: Any) -> None:
    """Assert equality, with both values in the message."""
    assert found == expected, f"found {found!r}, expected {expected!r}"


@contextmanager
def refused(*words: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Check that the block raises an error whose message contains all ``words``."""
    said = None
    try:
        yield
    except kind as error:
        said = str(error)
    assert said is not None, f"nothing was raised that says {words}"
    missing = [word for word in words if word not in said]
    assert not missing, f"{missing} not in: {said}"
