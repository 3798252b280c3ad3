from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpcaccel.spec.job import node_counts
from hpcaccel.spec.job import quantities as q


@pytest.mark.parametrize(
    ("text", "canonical", "seconds"),
    [
        ("30", "00:30:00", 1800),
        ("10:00", "00:10:00", 600),
        ("90:30", "01:30:30", 5430),
        ("1:30:00", "01:30:00", 5400),
        ("36:00:00", "1-12:00:00", 129600),
        ("1-0", "1-00:00:00", 86400),
        ("2-12", "2-12:00:00", 216000),
        ("1-02:03", "1-02:03:00", 93780),
        ("1-02:03:04", "1-02:03:04", 93784),
        ("UNLIMITED", "UNLIMITED", None),
        ("infinite", "UNLIMITED", None),
        ("-1", "UNLIMITED", None),
        ("0", "UNLIMITED", None),
    ],
)
def test_time_is_converted_to_canonical_form_and_seconds(text: str, canonical: str, seconds: int | None) -> None:
    assert q.canonical_time(text) == canonical
    assert q.time_seconds(canonical) == seconds


@pytest.mark.parametrize("text", ["", "tomorrow", "1.5", "1h", "1:2:3:4", "1-2-3", "-2", "1-", ":30", "1 0", "١٠"])
def test_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        q.canonical_time(text)


@pytest.mark.parametrize(
    ("text", "canonical", "megabytes"),
    [
        ("40G", "40G", 40960),
        ("40000M", "40000M", 40000),
        ("40000", "40000M", 40000),
        ("40960", "40G", 40960),
        ("1.5T", "1536G", 1536 * 1024),
        ("2t", "2T", 2 * 1024**2),
        ("40GB", "40G", 40960),
        ("512K", "1M", 1),
        ("0", "0", 0),
    ],
)
def test_memory_is_converted_to_canonical_form_and_megabytes(text: str, canonical: str, megabytes: int) -> None:
    assert q.canonical_memory(text) == canonical
    assert q.memory_megabytes(canonical) == megabytes


@pytest.mark.parametrize("text", ["", "-1", "40 G", "40X", "G", "1e3", "4,5G"])
def test_invalid_memory_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a memory size"):
        q.canonical_memory(text)


@pytest.mark.parametrize(
    ("text", "canonical", "span"),
    [
        ("2", "2", (2, 2)),
        ("02", "2", (2, 2)),
        ("2-4", "2-4", (2, 4)),
        ("3-3", "3", (3, 3)),
        ("2k", "2048", (2048, 2048)),
        ("1,2,4-8:2", "1,2,4-8:2", (1, 8)),
    ],
)
def test_nodes_are_converted_to_canonical_form_and_range(text: str, canonical: str, span: tuple[int, int]) -> None:
    assert node_counts.canonical_nodes(text) == canonical
    assert node_counts.node_range(canonical) == span


@pytest.mark.parametrize(("few", "more"), [("2", "3"), ("2-4", "3-5"), ("1,2,4-8:2", "2,3,5-9:2")])
def test_spare_nodes_are_added_to_each_size(few: str, more: str) -> None:
    assert node_counts.more_nodes(few, 1) == more


@pytest.mark.parametrize(
    ("text", "sizes"), [("2", [[2, 2, 1]]), ("2-4", [[2, 4, 1]]), ("1,2,4-8:2", [[1, 1, 1], [2, 2, 1], [4, 8, 2]])]
)
def test_sizes_of_a_node_count(text: str, sizes: list[list[int]]) -> None:
    assert node_counts.node_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "4-2", "two", "-2", "2-", "1:2", "2-4:0", "1.5"])
def test_invalid_number_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of nodes"):
        node_counts.canonical_nodes(text)


@pytest.mark.parametrize(
    ("text", "canonical", "count"),
    [("2", "2", 2), ("a100:2", "a100:2", 2), ("a100:2, v100:1", "a100:2,v100:1", 3), ("0", "0", 0)],
)
def test_gpus_are_converted_to_canonical_form_and_count(text: str, canonical: str, count: int) -> None:
    assert q.canonical_gpus(text) == canonical
    assert q.gpu_count(canonical) == count


@pytest.mark.parametrize("text", ["", "a100", "a100:", ":2", "a100:two", "2.5", "gpu:a100:2"])
def test_invalid_number_of_gpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of GPUs"):
        q.canonical_gpus(text)


@pytest.mark.parametrize(
    ("text", "canonical", "gpus"),
    [
        ("gpu:2", "gpu:2", 2),
        ("gpu", "gpu:1", 1),
        ("gpu:a100", "gpu:a100:1", 1),
        ("gpu:3090:2", "gpu:3090:2", 2),
        ("gpu:1g.10gb:3", "gpu:1g.10gb:3", 3),
        ("gpu:a100:2,shard:1", "gpu:a100:2,shard:1", 2),
        ("gres:gpu:2", "gpu:2", 2),
        ("shard:4", "shard:4", 0),
        ("NONE", "none", 0),
    ],
)
def test_gres_is_converted_to_canonical_form_and_gpu_count(text: str, canonical: str, gpus: int) -> None:
    assert q.canonical_gres(text) == canonical
    assert q.gres_gpus(canonical) == gpus


@pytest.mark.parametrize("text", ["", "gpu:", "gpu::2", "gpu:a100:2:3", "2", "gpu:a b:2", "gpu:2,"])
def test_invalid_gres_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of generic resources"):
        q.canonical_gres(text)


@given(st.integers(1, 10**9))
def test_canonical_time_keeps_its_value(seconds: int) -> None:
    canonical = q.canonical_time(f"0:{seconds}")
    assert q.canonical_time(canonical) == canonical
    assert q.time_seconds(canonical) == seconds


@given(st.integers(1, 10**9))
def test_canonical_memory_keeps_its_value(megabytes: int) -> None:
    canonical = q.canonical_memory(f"{megabytes}M")
    assert q.canonical_memory(canonical) == canonical
    assert q.memory_megabytes(canonical) == megabytes


@given(st.lists(st.tuples(st.integers(1, 10**4), st.integers(0, 50)), min_size=1, max_size=4))
def test_canonical_node_counts_keep_their_range(parts: list[tuple[int, int]]) -> None:
    canonical = node_counts.canonical_nodes(",".join(f"{low}-{low + more}" for low, more in parts))
    assert node_counts.canonical_nodes(canonical) == canonical
    assert node_counts.node_range(canonical) == (min(low for low, _ in parts), max(low + more for low, more in parts))


FORMS = (q.canonical_time, q.canonical_memory, node_counts.canonical_nodes, q.canonical_gpus, q.canonical_gres)


@given(st.sampled_from(FORMS), st.text(alphabet="0123456789-:,.kKmMGT a", max_size=12) | st.text(max_size=12))
@example(q.canonical_gpus, "00000")
@example(q.canonical_gpus, "10000")
def test_any_text_is_refused_or_has_a_stable_canonical_form(form: Callable[[str], str], text: str) -> None:
    try:
        canonical = form(text)
    except ValueError:
        with pytest.raises(ValueError, match=r"^is not "):
            form(text)
    else:
        assert form(canonical) == canonical
