"""What the protocols of processes send, ask and write is what the models of `make scale` say, count by count."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.checkpoint.test_kill_points import needs_strace

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SIZES = (2, 5, 16)
BLOCK_SIZES = (80,)

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [name for name in sys.modules if name == "scale" or name.startswith("scale.")]:
        del sys.modules[name]


def check_counts(kinds):
    from scale.cost_term import COUNT_FACTOR
    from scale.count_table import differences
    from scale.process_counts import count
    from scale.protocol_counts import PROTOCOLS

    counts = count(kinds, SIZES)
    assert set(counts) == {protocol.name for protocol in PROTOCOLS.values() if protocol.kind in kinds}
    assert all(set(by_size) == set(SIZES) for by_size in counts.values())
    of_kernel = {name for name in counts if PROTOCOLS[name].of_kernel}
    assert differences({name: counts[name] for name in of_kernel}, COUNT_FACTOR) == []
    assert differences({name: counts[name] for name in counts.keys() - of_kernel}) == []


@pytest.mark.slow
def test_requests_and_messages_of_processes_are_those_of_the_models():
    from scale.process_counts import COUNTERS, WITHOUT_TORCH

    check_counts([kind for kind in COUNTERS if kind not in WITHOUT_TORCH])


@needs_strace
def test_operations_on_files_are_those_of_the_models():
    from scale.process_counts import WITHOUT_TORCH

    check_counts(sorted(WITHOUT_TORCH))


@needs_strace
def test_operations_on_files_of_several_blocks_are_those_of_the_models():
    from scale.cost_term import COUNT_FACTOR
    from scale.count_table import differences
    from scale.process_counts import count

    counts = count(["commit"], BLOCK_SIZES)
    # Two writers that finish at the same time may both merge the reports of their block.
    of_writer = {name: counts.pop(name) for name in list(counts) if name.endswith("a writer")}
    assert len(of_writer) == 1
    assert differences(of_writer, COUNT_FACTOR) == []
    assert differences(counts) == []


def test_every_counted_protocol_has_a_model_and_is_recorded():
    from scale.count_table import differences
    from scale.process_counts import COUNTERS
    from scale.protocol_counts import PROTOCOLS, load

    assert set(COUNTERS) == {protocol.kind for protocol in PROTOCOLS.values()}
    recorded = load()
    assert set(recorded) == set(PROTOCOLS)
    assert differences(recorded) == []


def test_count_that_is_not_the_models_is_named():
    from scale.count_table import differences

    assert differences({"save: messages to rank 0": {8: 4.0, 16: 4.0}}) == [
        "save: messages to rank 0, 8 processes: counted 4, model 3"
    ]


def test_what_is_critical_and_reduced_along_a_tree_grows_by_the_same_amount_with_each_level():
    from scale.protocol_counts import PROTOCOLS

    for protocol in PROTOCOLS.values():
        if protocol.critical and protocol.grows == "log P":
            few, more, most = (protocol.at(16**levels) for levels in (2, 3, 4))
            assert most - more == more - few > 0, protocol.name
