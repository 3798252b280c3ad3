"""Names that scripts import from ``accelerate.test_utils``: a small regression problem, two checks, and the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from hpcaccel.runtime.distributed.device_backend import accelerator, device_count, module_of

__all__ = [
    "RegressionDataset",
    "RegressionModel",
    "are_the_same_tensors",
    "assert_exception",
    "get_backend",
    "torch_device",
]

torch_device = accelerator()
"""This machine's kind of device: ``cuda``, ``xpu``, ``mps`` …, or ``cpu``."""


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """This machine's kind of device, the number of such devices (1 for the CPU), and a function that returns how many
    bytes of the current device's memory torch uses (0 where torch does not count them)."""
    found: Callable[[], int] | None = None
    if torch_device != "cpu":
        module = module_of(torch_device)
        found = getattr(module, "memory_allocated", None) or getattr(module, "current_allocated_memory", None)
    return torch_device, max(1, device_count(torch_device)), found or (lambda: 0)


class RegressionDataset:
    """Points of ``y = a x + b`` with noise, as dictionaries with ``x`` and ``y``.

    Args:
        seed: seed of numpy's generator; with None the points are different each time.
    """

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        generator = np.random.default_rng(seed)
        self.length = length
        self.x = generator.normal(size=length).astype(np.float32)
        self.y = a * self.x + b + generator.normal(scale=0.1, size=length).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, np.float32]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(nn.Module):
    """The model ``a x + b`` with parameters ``a`` and ``b``. ``double_output`` is ignored."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(float(a)))
        self.b = nn.Parameter(torch.tensor(float(b)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a + self.b


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Whether all ranks passed the same values. All ranks must call this function."""
    from hpcaccel.runtime.distributed.collectives.functions import gather

    rows = gather(tensor.detach().clone()[None])
    return all(torch.equal(row, rows[0]) for row in rows)


@contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Check that the block raises ``exception_class`` with ``msg`` in its text.

    Raises:
        AssertionError: the block raised nothing, or an exception of another class or with another text.
    """
    try:
        yield
    except exception_class as error:
        if msg is not None and msg not in str(error):
            raise AssertionError(f"expected {msg!r} in the message, got: {error}") from error
        return
    except Exception as error:
        raise AssertionError(f"expected {exception_class.__name__}, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"expected {exception_class.__name__}, but nothing was raised")
