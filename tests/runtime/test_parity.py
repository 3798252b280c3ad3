"""Weights after every kind of parallel training match those of a plain loop on one process (float64)."""

from __future__ import annotations

import pytest

from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.torch

SPLIT = ["ddp-split", "ddp-split-accumulate", "fsdp-split", "fsdp-split-accumulate"]
WAYS = {
    1: ["ddp-accumulate", "fsdp", "fsdp-accumulate", *SPLIT],
    2: [
        "ddp",
        "ddp-accumulate",
        "ddp-static",
        "ddp-deterministic-accumulate",
        "fsdp",
        "fsdp-accumulate",
        "fsdp-keep",
        "fsdp-size",
        "tp",
        *SPLIT,
    ],
    4: ["ddp", "fsdp", "hybrid", "hybrid-accumulate", "tp", "tp-fsdp", "ddp-split-accumulate"],
}


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.chaos)])
def test_trained_weights_match_a_plain_loop(size: int) -> None:
    ended = run_ranks("parity.py", WAYS[size], size=size)
    assert ended.codes == [0] * size, "\n".join(ended.outputs)
    found = ended.result()
    assert sorted(found) == sorted(WAYS[size])
    assert {way: far for way, far in found.items() if far > 1e-10} == {}


def test_compiled_model_weights_match_a_plain_loop() -> None:
    ways = ["ddp-compile", "fsdp-regional"]
    ended = run_ranks("parity.py", ways)
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    assert all(far <= 1e-10 for far in ended.result().values())
