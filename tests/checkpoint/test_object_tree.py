"""Broadcast, and gather, fold and scatter along a tree of ranks, and the errors that travel with them."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist

from hpcaccel.checkpoint import object_tree
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.errors import CheckpointError

from .world import run_ranks

pytestmark = pytest.mark.torch
RANKS = 5


def gather_and_scatter(rank):
    sent = []
    original = dist.send
    dist.send = lambda *args, **words: (sent.append(1), original(*args, **words))
    found = object_tree.gather({rank: "x" * (1 + 1000 * rank)}, None)
    after_gather = len(sent)
    part = object_tree.scatter({number: [number, None] for number in range(RANKS)} if rank == 0 else None, None)
    return found, part, after_gather, len(sent) - after_gather


def test_values_of_different_sizes_reach_rank_0_and_parts_reach_their_rank():
    results = run_ranks(gather_and_scatter, world_size=RANKS)
    assert results[0][0] == {rank: "x" * (1 + 1000 * rank) for rank in range(RANKS)}
    assert [found for found, *_ in results[1:]] == [None] * (RANKS - 1)
    assert [part for _, part, *_ in results] == [[rank, None] for rank in range(RANKS)]
    for _, _, gathered, scattered in results:  # large objects are two messages, small ones one
        assert gathered <= 2
        assert scattered <= math.ceil(math.log2(RANKS))


SIZES = (0, 1, 900, 990, 1000, 1001, 1002, 1003, 1004, 1010, 1016, 1024, 1100, 100_000)
"""Sizes of objects around the size of the first message, to which pickle adds some bytes."""


def of_every_size(rank):
    calls = []
    original = dist.broadcast
    dist.broadcast = lambda *args, **words: (calls.append(1), original(*args, **words))
    found = []
    for size in SIZES:
        calls.clear()
        value = object_tree.broadcast(bytes(size) if rank == 0 else "ignored", None)
        gathered = object_tree.gather({rank: bytes(size)}, None)
        found.append((value == bytes(size), gathered in (None, dict.fromkeys(range(RANKS), value)), len(calls)))
    return found


def test_objects_of_every_size_arrive_and_small_ones_are_one_message():
    for found in run_ranks(of_every_size, world_size=RANKS):
        assert [arrived for arrived, _, _ in found] == [True] * len(SIZES)
        assert [arrived for _, arrived, _ in found] == [True] * len(SIZES)
        assert [calls for *_, calls in found][:3] == [1, 1, 1]
        assert [calls for *_, calls in found][-2:] == [2, 2]


def equal_answers(rank):
    received = []
    receive = object_tree._receive
    object_tree._receive = lambda *args: received.append(receive(*args)) or received[-1]
    found = [object_tree.gather({rank: [rank == odd]}, None) for odd in (RANKS, 2)]
    some = object_tree.gather({rank: "here"} if rank in (1, 3) else {}, None)
    return found, some, [[run[:2] for run in runs] for runs in received]


def test_equal_answers_of_neighbours_travel_once():
    results = run_ranks(equal_answers, world_size=RANKS)
    found, some, received = results[0]
    assert found == [{rank: [False] for rank in range(RANKS)}, {rank: [rank == 2] for rank in range(RANKS)}]
    assert len({id(value) for value in found[0].values()}) == RANKS  # not one list for all ranks
    assert some == {1: "here", 3: "here"}
    equal, odd, few = received[:3], received[3:6], received[6:]
    assert equal == [[(1, 1)], [(2, 2)], [(4, 1)]]
    assert odd == [[(1, 1)], [(2, 1), (3, 1)], [(4, 1)]]
    assert few == [[(1, 1)], [(3, 1)], []]


def folded(rank):
    received = []
    receive = object_tree._receive
    object_tree._receive = lambda *args: received.append(receive(*args)) or received[-1]
    return object_tree.fold([rank], lambda one, other: one + other, None), received


def test_fold_combines_the_values_of_all_ranks_in_order():
    results = run_ranks(folded, world_size=RANKS)
    assert [found for found, _ in results] == [list(range(RANKS)), *[None] * (RANKS - 1)]
    assert results[0][1] == [[1], [2, 3], [4]]


def errors(rank):
    ranks = CheckpointRanks(rank=rank, world_size=RANKS)
    messages = []

    def fail():
        if rank in (2, 3):
            raise CheckpointError("no room")
        return rank

    for call in (
        lambda: ranks.run("saving failed", fail),
        lambda: ranks.reduce("saving failed", fail, sum),
        lambda: ranks.reduce_scatter("saving failed", fail, lambda values: values),
        lambda: ranks.fold("saving failed", fail, max, lambda value: value),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        messages.append(str(caught.value))
    total = ranks.reduce("saving failed", lambda: rank, sum)
    own = ranks.reduce_scatter("saving failed", lambda: rank, lambda values: [2 * value for value in values])
    largest = ranks.fold("saving failed", lambda: rank, max, lambda value: 10 * value)
    with pytest.raises(CheckpointError, match="saving failed: ZeroDivisionError"):
        ranks.fold("saving failed", lambda: rank, min, lambda value: 1 // value)
    return messages, total, own, largest


def test_error_of_some_ranks_is_raised_on_all_ranks():
    for rank, (messages, total, own, largest) in enumerate(run_ranks(errors, world_size=RANKS)):
        assert len(set(messages)) == 1
        assert messages[0].startswith("saving failed: no room (rank 2 on ")
        assert messages[0].endswith(" and 1 more)")
        assert (total, own, largest) == (sum(range(RANKS)), 2 * rank, 10 * (RANKS - 1))
