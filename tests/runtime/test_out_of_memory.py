"""find_executable_batch_size on one rank; on several ranks: see ``test_ops``."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hpcaccel.runtime.compat.out_of_memory import (  # noqa: E402
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)

pytestmark = pytest.mark.torch


def out_of_memory() -> RuntimeError:
    return RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


def test_batch_size_shrinks_until_it_fits_and_is_remembered() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, word: str, *, end: str = "") -> str:
        """Doc."""
        tried.append(batch_size)
        if batch_size > 80:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return f"{word} {batch_size}{end}"

    assert train("at", end="!") == "at 72!"
    assert tried == [100, 90, 81, 72]
    assert train("at") == "at 72"
    assert (train.__name__, train.__doc__) == ("train", "Doc.")


def test_custom_function_chooses_the_next_batch_size() -> None:
    sizes = iter([50, 7])

    def train(batch_size: int) -> int:
        if batch_size > 10:
            raise out_of_memory()
        return batch_size

    assert find_executable_batch_size(train, starting_batch_size=64, reduce_batch_size_fn=lambda: next(sizes))() == 7


def test_error_is_raised_when_no_batch_size_fits() -> None:
    @find_executable_batch_size(starting_batch_size=3)
    def train(batch_size: int) -> None:
        raise out_of_memory()

    with pytest.raises(RuntimeError, match="No executable batch size found"):
        train()


def test_passing_the_batch_size_is_refused() -> None:
    @find_executable_batch_size
    def train(batch_size: int, model: str) -> None: ...

    with pytest.raises(TypeError, match=r"passes the batch size itself.*Call train\(model='m'\)"):
        train(128, "m")


def test_other_errors_are_raised_unchanged() -> None:
    @find_executable_batch_size(starting_batch_size=3)
    def train(batch_size: int) -> None:
        raise ValueError("out of memory for names")

    with pytest.raises(ValueError, match="for names"):
        train()


def test_out_of_memory_errors_are_recognised() -> None:
    assert should_reduce_batch_size(torch.OutOfMemoryError("x"))
    assert should_reduce_batch_size(out_of_memory())
    assert should_reduce_batch_size(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"))
    assert not should_reduce_batch_size(RuntimeError("shape mismatch"))


def test_failed_cpu_allocation_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert should_reduce_batch_size(caught.value)


def test_release_memory_returns_none_for_each_object() -> None:
    held = torch.ones(3)
    nothing, more = release_memory(held, [held])
    assert (nothing, more) == (None, None)
