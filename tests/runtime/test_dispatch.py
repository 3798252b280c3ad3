"""``dispatch_batches``: rank 0 reads for all ranks, and each rank receives only its part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.global_batches import RankBatch, shared_out
from hpcaccel.runtime.data.sharding import Sharing
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    ended = run_ranks("dispatch.py", size=2)
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    return ended.result()


def batches(part: list[Any]) -> list[list[int]]:
    return [batch for batch, *_ in part]


def test_ranks_get_whole_batches_and_the_last_round_is_filled_up(found: dict[str, Any]) -> None:
    assert [batches(part) for part in found["8 False False"]] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [batches(part) for part in found["9 False False"]] == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [0]]]
    assert [batches(part) for part in found["8 True False"]] == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    assert [batches(part) for part in found["9 False True"]] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [batches(part) for part in found["1 False False"]] == [[[0]], [[0]]]
    assert [batches(part) for part in found["1 False True"]] == [[], []]
    assert [batches(part) for part in found["3 False False"]] == [[[0, 1]], [[2, 0]]]


def test_each_rank_gets_the_valid_count_and_the_last_batch_flag(found: dict[str, Any]) -> None:
    assert [part[-1][1:] for part in found["3 False False"]] == [[2, None, True], [2, 1, True]]
    for name, parts in found.items():
        if name[0].isdigit():
            for part in parts:
                assert [last for *_, last in part] == [False] * (len(part) - 1) + [True] * bool(part)


def test_rank_may_get_fewer_batches_with_even_batches_false(found: dict[str, Any]) -> None:
    assert [batches(part) for part in found["uneven"]] == [[[0, 1], [4]], [[2, 3]]]
    assert [part[-1][3] for part in found["uneven"]] == [True, True]


def test_map_style_dataset_is_dispatched_in_the_order_of_its_sampler(found: dict[str, Any]) -> None:
    order = found["order"]
    assert found["map"][0] == [order[0:2], order[4:6], order[8:9]]
    assert found["map"][1] == [order[2:4], order[6:8], order[9:10]]
    assert found["length"] == 3


def test_batches_of_differing_shapes_and_types_are_dispatched(found: dict[str, Any]) -> None:
    first, second = found["rich"]
    assert first[0] == [[[0.0] * 3], "torch.bfloat16", [False], ["s0"], [1, 1], 0]
    assert second[1] == [[[3.0] * 3], "torch.bfloat16", [True], ["s3"], [1, 4], 0]
    assert len(first) == len(second) == 3


def test_slice_fn_of_the_user_divides_batches(found: dict[str, Any]) -> None:
    assert found["slice_fn"] == [[[0, 10, 20, 30]], [[41, 51, 61, 71]]]


def test_batch_that_cannot_be_divided_is_an_error_on_all_ranks(found: dict[str, Any]) -> None:
    for text in found["ragged"]:
        assert text.startswith("RuntimeMisuse: a batch with first dimensions [2, 7]")


def test_read_error_on_rank_0_raises_on_all_ranks(found: dict[str, Any]) -> None:
    assert found["failed"][0] == "OSError: the disk is gone"
    assert found["failed"][1].startswith("HpcaccelError: rank 0 could not read the data: OSError: the disk is gone")


def test_dispatched_loader_resumes_in_the_middle_of_an_epoch(found: dict[str, Any]) -> None:
    assert found["resumed"] == [[[8, 9], [12, 13]], [[10, 11], [14, 15]]]
    assert [len(texts) for texts in found["warned"]] == [1, 0]


def test_rng_types_copies_the_generator_state_of_rank_0(found: dict[str, Any]) -> None:
    assert found["synced"][0] == found["synced"][1]


def parts(raw: list[Any], size: int = 2, **options: Any) -> list[list[RankBatch | None]]:
    return [given for given, _ in shared_out(raw, Sharing(rank=0, size=size, **{"batch_size": 2} | options))]


def test_short_batches_in_the_middle_lose_no_samples() -> None:
    """Each worker of a stream ends with a short batch, where Accelerate drops samples."""
    raw = [torch.arange(0, 2), torch.arange(2, 3), torch.arange(3, 5), torch.arange(5, 7)]
    given = parts(raw)
    assert [[part.batch.tolist() for part in row if part] for row in given] == [[[0, 1], [2]], [[3, 4], [5, 6]]]


def test_batches_padded_to_different_widths_are_not_joined() -> None:
    given = parts([torch.zeros(2, width) for width in (3, 4, 5, 6)], size=3)
    assert [(tuple(part.batch.shape), part.valid) for part in given[1] if part] == [
        ((1, 6), None),
        ((1, 6), None),
        ((1, 6), 0),
    ]
    given = parts([torch.zeros(2, width) for width in (3, 4, 5, 6, 7)], size=3)
    assert [(tuple(part.batch.shape), part.valid) for part in given[1] if part] == [
        ((2, 6), None),
        ((2, 7), None),
        ((2, 6), 0),
    ]


def test_batch_without_tensors_cannot_be_divided() -> None:
    with pytest.raises(RuntimeMisuse, match="no tensor with a first dimension"):
        parts([{"text": "a"}], split=True)
