"""Collective operations, each case a function that asserts; the last line of output has the results."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch.utils.data import DataLoader

from hpcaccel import Accelerator
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.compat.out_of_memory import find_executable_batch_size
from hpcaccel.runtime.distributed.collectives import functions as together
from hpcaccel.runtime.distributed.collectives import gathering
from hpcaccel.runtime.handlers import InitProcessGroupKwargs
from hpcaccel.runtime.rng.generators import synchronize_rng_states
from hpcaccel.runtime.training.gradient_sync import LocalSGD
from hpcaccel.utils.operations import DistributedOperationException

accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=60))])
RANK, SIZE = accelerator.process_index, accelerator.num_processes
Pair = namedtuple("Pair", "left right")


def ranks(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The gathered tensor if each rank's is filled with its rank."""
    return torch.cat([torch.full(shape, rank, dtype=torch.int64).to(dtype) for rank in range(SIZE)])


def gather_keeps_containers_and_types() -> None:
    own = torch.full((2, 3), RANK)
    value = OrderedDict(a=[own, (own.bool(),)], b=Pair(own.bfloat16(), torch.tensor(float(RANK))))
    found = accelerator.gather(value)
    assert isinstance(found, OrderedDict)
    assert isinstance(found["b"], Pair)
    assert torch.equal(found["a"][0], ranks(2, 3, dtype=torch.int64))
    assert torch.equal(found["a"][1][0], ranks(2, 3).bool())
    assert torch.equal(found["b"].left, ranks(2, 3, dtype=torch.bfloat16))
    assert torch.equal(found["b"].right, torch.arange(SIZE).float())  # 0-d becomes 1-d


def gather_takes_any_layout_and_type() -> None:
    own = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(accelerator.gather(own.t()), torch.cat([own.t()] * SIZE))
    assert accelerator.gather(torch.zeros(0, 3)).shape == (0, 3)
    for dtype in (torch.complex64, torch.int16, torch.float16, torch.float8_e4m3fn):
        assert accelerator.gather(own.to(dtype)).dtype == dtype
    large = torch.full((500, 40), float(RANK), requires_grad=True)
    found = accelerator.gather({"x": large, "y": torch.full((7,), RANK, dtype=torch.bool)})
    assert torch.equal(found["x"], ranks(500, 40))
    assert not found["x"].requires_grad
    assert found["y"].shape == (7 * SIZE,)


def gather_of_something_else_says_what_to_use() -> None:
    if SIZE == 1:
        assert accelerator.gather(["text"]) == ["text"]
        return
    with pytest.raises(TypeError, match=r"gather takes tensors.*got 'text' \(str\)\. Use gather_object"):
        accelerator.gather({"a": torch.ones(1), "b": "text"})


def reduce_sums_and_averages() -> None:
    total = sum(range(SIZE))
    for size in (3, 1000):  # sent inside the message, and after it
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16):
            own = torch.full((size,), RANK).to(dtype)
            found = accelerator.reduce({"x": own})["x"]
            assert found.dtype == dtype
            assert (found == total).all()
            assert (own == RANK).all()  # the input is unchanged
        assert (accelerator.reduce(torch.full((size,), RANK), reduction="mean") == total / SIZE).all()
        assert (accelerator.reduce(torch.full((size,), RANK), reduction="max") == SIZE - 1).all()
        assert (accelerator.reduce(torch.full((size,), RANK == 0)) == torch.tensor(True)).all()
        assert (accelerator.reduce(torch.full((size,), float(RANK)), scale=0.5) == total / 2).all()
        assert (accelerator.reduce(torch.full((size,), RANK), reduction="none") == RANK).all()
        assert (together.reduce(torch.full((size,), RANK)) == total / SIZE).all()  # the default is the mean
    with pytest.raises(RuntimeMisuse, match="unknown reduction 'median'"):
        accelerator.reduce(torch.ones(1), reduction="median")


def padding_goes_to_the_longest() -> None:
    own = torch.full((1 + RANK, 2), RANK + 1)
    found = accelerator.pad_across_processes({"x": own, "y": torch.tensor(1)}, pad_index=-1)
    assert torch.equal(found["x"], torch.cat([own, torch.full((SIZE - 1 - RANK, 2), -1)]))
    assert found["y"].ndim == 0
    first = accelerator.pad_across_processes(own.t(), dim=-1, pad_first=True)
    assert torch.equal(first, torch.cat([torch.zeros(2, SIZE - 1 - RANK, dtype=torch.int64), own.t()], 1))
    assert accelerator.gather(found["x"]).shape == (SIZE * SIZE, 2)


def broadcasting_and_objects() -> None:
    last = SIZE - 1
    for size in (2, 1000):
        own = torch.full((size,), RANK)
        assert together.broadcast(own, from_process=last) is own
        assert (own == last).all()
    words = [RANK, "x" * 500 * RANK]
    assert together.broadcast_object_list(words, from_process=last) is words
    assert words == [last, "x" * 500 * last]
    assert together.gather_object([f"rank {RANK}"] * (1 + RANK)) == [
        f"rank {rank}" for rank in range(SIZE) for _ in range(1 + rank)
    ]
    found = together.copy_tensor_to_devices(torch.arange(3) if last == RANK else None)
    assert torch.equal(found, torch.arange(3))
    with pytest.raises(RuntimeMisuse, match=rf"from_process={SIZE} is not a rank"):
        together.broadcast(torch.ones(1), from_process=SIZE)


def triggers_are_seen_by_all_and_reset() -> None:
    assert not accelerator.check_trigger()
    if RANK == SIZE - 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def metrics_hold_every_sample_once() -> None:
    for count, size in ((23, 4), (8, 4), (3, 4), (21, 7)):
        loader = accelerator.prepare(DataLoader(torch.arange(count), batch_size=size))
        seen, words, statistics = [], [], []
        for batch in loader:
            found = accelerator.gather_for_metrics(
                {"x": batch, "words": [str(int(item)) for item in batch], "all": torch.ones(size + 4)}
            )
            seen += found["x"].tolist()
            words += found["words"]
            statistics.append(len(found["all"]))
            assert len(accelerator.gather_for_metrics((batch, batch.float()[:, None]))[1]) == len(found["x"])
        assert sorted(seen) == list(range(count)), (count, size, seen)
        assert words == [str(item) for item in seen]
        assert set(statistics) == {(size + 4) * SIZE}  # a statistic is not cut like a list of samples
        assert len(accelerator.gather_for_metrics(torch.ones(size))) == size * SIZE  # the loader has ended


def metrics_of_unequal_parts() -> None:
    loader = DataLoader(torch.arange(4 * SIZE + 3), batch_size=4)
    loader = accelerator.prepare_data_loader(loader)
    seen = [item for batch in loader for item in accelerator.gather_for_metrics(batch).tolist()]
    assert sorted(seen) == list(range(4 * SIZE + 3))
    for batch in loader:
        found = accelerator.gather_for_metrics([int(item) for item in batch], use_gather_object=True)
    assert len(found) == 3 if SIZE > 1 else len(found) in (3, 4)
    own = accelerator.gather_for_metrics("word")
    assert own == (["word"] * SIZE if SIZE > 1 else "word")


def different_shapes_are_refused_everywhere() -> None:
    if SIZE == 1:
        return
    with pytest.raises(DistributedOperationException) as caught:
        accelerator.gather({"x": torch.ones(2 + (RANK == 1), 5)})
    assert "rank 1: gather of dict('x': float32[3, 5]) at " in str(caught.value)
    assert "together.py:" in str(caught.value)
    assert "pad_across_processes" in str(caught.value)
    with pytest.raises(RuntimeMisuse, match=r"dict\('x': int64\[1\]\)"):
        accelerator.reduce(torch.ones(1) if RANK else {"x": torch.ones(1, dtype=torch.int64)})
    with pytest.raises(RuntimeMisuse, match="the ranks make different collective calls"):
        accelerator.wait_for_everyone() if RANK else accelerator.gather(torch.ones(1))
    assert accelerator.gather(torch.ones(1)).sum() == SIZE  # the group still works


def batch_sizes_are_agreed_on() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=None)
    def train(batch_size: int, limit: int, *, name: str = "") -> tuple[int, str]:
        tried.append(batch_size)
        if batch_size > limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
        total = accelerator.gather(torch.tensor([batch_size]))  # ranks that wait here are called back
        assert (total == batch_size).all()
        return batch_size, name

    fitting = [50, 33, 60, 41][RANK % 4]
    found = train(fitting, name="x")
    assert found == (min([50, 33, 60, 41][:SIZE]) if SIZE == 1 else found[0], "x") or found[1] == "x"
    assert len(set(together.gather_object([found[0]]))) == 1
    assert found[0] <= min([50, 33, 60, 41][: min(SIZE, 4)])
    assert tried[:3] == [64, 57, 51]

    @find_executable_batch_size(starting_batch_size=4)
    def never(batch_size: int) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")

    with pytest.raises(RuntimeError, match="No executable batch size found"):
        never()
    with pytest.raises(TypeError, match=r"train\(\) was called with .* Call train\(limit=3, name=5\)"):
        train(8, 3, 5)


def local_sgd_averages_now_and_then() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, bias=False)
    start = model.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    weight = accelerator.unwrap_model(model).weight
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for step in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 3), float(RANK))).sum())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            own = start - 0.5 * (step + 1) * RANK
            mean = start - 0.5 * (step + 1) * (SIZE - 1) / 2
            if step == 0:
                assert torch.allclose(weight, own)
            elif step == 1:
                assert torch.allclose(weight, mean)
    assert torch.allclose(weight, start - 0.5 * 3 * (SIZE - 1) / 2)
    accelerator.free_memory()


def uneven_inputs_are_joined() -> None:
    for steps in (1, 2):
        accelerator.gradient_accumulation_steps = steps
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(torch.arange(float(3 * SIZE + 1))[:, None], batch_size=1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with accelerator.join_uneven_inputs([model], even_batches=False):
            seen = 0
            for batch in loader:
                with accelerator.accumulate(model):
                    seen += 1
                    accelerator.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
        assert seen == 3 + (RANK == 0)
        assert len(loader) == 4  # even_batches is restored
        weight = accelerator.unwrap_model(model).weight.detach()
        assert (accelerator.gather(weight) == weight).all()
        accelerator.free_memory()
    accelerator.gradient_accumulation_steps = 1


def generators_are_brought_together() -> None:
    torch.manual_seed(RANK)
    generator = torch.Generator().manual_seed(RANK)
    synchronize_rng_states(["torch", "generator", "python", "numpy"], generator)
    for drawn in (torch.rand(3), torch.rand(3, generator=generator)):
        assert (accelerator.gather(drawn[None]) == drawn).all()
    with pytest.raises(RuntimeMisuse, match="needs a generator"):
        synchronize_rng_states(["generator"])


def dtensors_are_whole() -> None:
    if SIZE == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(8.0)
    spread = distribute_tensor(whole, init_device_mesh("cpu", (SIZE,)), [Shard(0)])
    found = accelerator.gather({"spread": spread, "own": torch.tensor([RANK])})
    assert torch.equal(found["spread"], whole)
    assert torch.equal(found["own"], torch.arange(SIZE))
    assert torch.allclose(accelerator.reduce(spread, reduction="mean"), whole)


def a_loss_that_is_divided_twice_is_told_of_once() -> None:
    accelerator.gradient_accumulation_steps = 4
    weight = torch.nn.Parameter(torch.ones(1))
    with pytest.warns(UserWarning, match=r"together\.py:\d+: this loss has already been divided by 4"):
        accelerator.backward(weight.sum() / 4)
    assert weight.grad is not None
    assert weight.grad.item() == 1 / 16  # as in Accelerate
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.backward(weight.sum() / 4)
    accelerator.gradient_accumulation_steps = 1


def tensors_of_gpus_go_over_the_default_group() -> None:
    """Simulated without a GPU: every tensor is treated as if on one."""
    if SIZE == 1:
        return
    exchange = accelerator._session.group.exchange
    split, exchange.device_calls = gathering._by_device, 0
    gathering._by_device = lambda tensors, group: ([], list(range(len(tensors))))
    try:
        for dtype in (torch.float32, torch.bool, torch.bfloat16, torch.int64, torch.complex64):
            own = torch.full((2, 3), RANK).to(dtype)
            assert torch.equal(accelerator.gather({"x": own.t()})["x"].real, ranks(3, 2, dtype=dtype).real)
            if not dtype.is_complex:
                assert accelerator.reduce(own).sum() == 6 * (1 if dtype is torch.bool else sum(range(SIZE)))
            assert (together.broadcast(own.t(), from_process=SIZE - 1).real == SIZE - 1).all() or dtype is torch.bool
        assert accelerator.gather(torch.zeros(0, 2)).shape == (0, 2)
        with pytest.raises(RuntimeMisuse, match=r"rank 0: gather of float32\[1\] at"):
            accelerator.gather(torch.ones(1 + RANK))
        while exchange.device_calls < gathering.CHECKED_CALLS:
            accelerator.gather(torch.ones(1))
        before = exchange.watchdog.entered["calls"]
        accelerator.gather(torch.ones(1))
        assert exchange.watchdog.entered["calls"] == before  # calls are no longer compared
        exchange.debug = True
        with pytest.raises(RuntimeMisuse, match=r"rank 1: reduce of float32\[2\] at"):
            accelerator.reduce(torch.ones(1 + RANK))
    finally:
        gathering._by_device, exchange.debug = split, False


CASES: list[Callable[[], None]] = [
    a_loss_that_is_divided_twice_is_told_of_once,
    gather_keeps_containers_and_types,
    gather_takes_any_layout_and_type,
    gather_of_something_else_says_what_to_use,
    reduce_sums_and_averages,
    padding_goes_to_the_longest,
    broadcasting_and_objects,
    triggers_are_seen_by_all_and_reset,
    metrics_hold_every_sample_once,
    metrics_of_unequal_parts,
    different_shapes_are_refused_everywhere,
    batch_sizes_are_agreed_on,
    local_sgd_averages_now_and_then,
    uneven_inputs_are_joined,
    generators_are_brought_together,
    dtensors_are_whole,
    tensors_of_gpus_go_over_the_default_group,
]

if __name__ == "__main__":
    wanted = sys.argv[1:]
    results = {}
    for case in CASES:
        if wanted and case.__name__ not in wanted:
            continue
        try:
            case()
            results[case.__name__] = "ok"
        except Exception:
            traceback.print_exc()
            results[case.__name__] = traceback.format_exc()[-1500:]
            break  # the ranks may no longer be in step
    print(json.dumps(results), flush=True)
    # A failure on any rank counts, and is shown in that rank's output.
    sys.exit(any(result != "ok" for result in results.values()))
